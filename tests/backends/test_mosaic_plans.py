"""How the Mosaic kernels deal out their work, on thousands of random batches: all on the CPU.

Who computes which keys, who waits for whom, and where partial results lie: a kernel that is told
wrong stops for ever, or writes where others read. Lengths may be anything, as in jit they may.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mosaic_rules import BF16

from pagedattn import AttentionSpec
from pagedattn.backends.mosaic.dense import kernel, split_kv, tile_tasks, tiles
from pagedattn.backends.mosaic.dense.kernel_config import Shape
from pagedattn.backends.mosaic.latents import split_kv as latent_split
from pagedattn.backends.mosaic.latents.kernel_config import KEYS
from pagedattn.backends.mosaic.latents.kernel_config import Shape as Latents
from pagedattn.batch.metadata import rising

BATCHES, HEADS, MAX_BLOCKS = 2000, 2, 120  # of 16 keys


def shape_of(num_seqs, parts, spec, *, longest, group, pad):
    """As `launch.shape_of` makes it for sequences of so many queries at most."""
    num_tokens = max(8, num_seqs * longest + pad)
    sizes = num_tokens, HEADS * group, HEADS, 128, 999, 16, num_seqs, MAX_BLOCKS
    units = -(-longest // 8) * group
    return Shape(*sizes, spec, with_lse=True, units=units, parts=parts)


SHAPES = {
    "one long": shape_of(1, 13, AttentionSpec(), longest=1, group=4, pad=0),
    "windows": shape_of(7, 9, AttentionSpec(sliding_window=300), longest=8, group=1, pad=70),
    "more sequences than parts": shape_of(20, 3, AttentionSpec(), longest=4, group=8, pad=5),
    "two warpgroups": shape_of(
        4, 8, AttentionSpec(causal=False, sliding_window=700), longest=30, group=4, pad=9
    ),
}


def random_lengths(seed, num_seqs, longest, num_tokens, capacity):
    """Starts and seq_lens: ragged, many short or 0; every fourth batch is of any integers."""
    rng = np.random.default_rng(seed)
    size = BATCHES, num_seqs
    scale = rng.choice([1, 0.1, 0.01], size)  # so that few are long
    seq_lens = rng.integers(0, capacity + 1, size) * (rng.random(size) < 0.9) * scale
    query_lens = rng.integers(0, longest + 1, size)
    starts = np.pad(np.cumsum(query_lens, axis=1), ((0, 0), (1, 0)))
    wild = slice(0, BATCHES, 4)
    seq_lens[wild] = rng.integers(-(2**31), 2**31, seq_lens[wild].shape)
    starts[wild] = rng.integers(-num_tokens, 3 * num_tokens, starts[wild].shape)
    return jnp.asarray(starts, jnp.int32), jnp.asarray(seq_lens.astype(np.int64), jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def plan(shape, starts, seq_lens):
    """The tiles, and of every program the number of its jobs, and these, with some to spare."""
    starts = rising(starts)
    work = split_kv.work_of(shape, starts, seq_lens)
    numbers = jnp.arange(shape.max_tiles, dtype=jnp.int32)
    all_tiles = split_kv.tile_at(shape, starts, seq_lens, numbers)
    blocks = tiles.key_blocks(shape, all_tiles)
    blocks = blocks._replace(count=jnp.where(split_kv.is_one(shape, all_tiles), blocks.count, 0))

    def of_program(me):
        mine = split_kv.cut_tiles(shape, me, work)
        return mine.count, jax.vmap(lambda i: mine.job_of(i, mine.look_up(i), i))(numbers)

    programs = jnp.arange(shape.parts * HEADS, dtype=jnp.int32)
    return all_tiles, blocks, *jax.vmap(of_program)(programs)


@functools.cache
def planned(name):
    """The shape, its tiles, their key blocks; of all jobs the batch, the program, and the job."""
    shape = SHAPES[name]
    longest = shape.units // shape.group * 8
    capacity = shape.max_blocks * shape.block_size
    lengths = random_lengths(len(name), shape.num_seqs, longest, shape.num_tokens, capacity)
    found = jax.vmap(functools.partial(plan, shape))(*lengths)
    all_tiles, blocks, counts, found = jax.tree.map(np.asarray, found)
    there = found.index < counts[..., None]
    batch, program, _ = np.nonzero(there)
    return shape, all_tiles, blocks, batch, program, jax.tree.map(lambda x: x[there], found)


def times_seen(shape, where, first, last):
    """How often each number up to a size lies between a first and a last one, at every place."""
    edges = np.zeros((*shape[:-1], shape[-1] + 1), int)
    np.add.at(edges, (*where, first), 1)
    np.add.at(edges, (*where, last + 1), -1)
    return edges.cumsum(axis=-1)[..., :-1]


@pytest.mark.parametrize("name", SHAPES)
def test_each_key_block_of_a_tile_is_in_one_job(name):
    shape, _, blocks, batch, _, job = planned(name)
    number = np.arange(MAX_BLOCKS * 16 // shape.keys + 1)
    places, where = (BATCHES, HEADS, shape.max_tiles), (batch, job.head, job.tile.slot)
    first = job.blocks.last - job.blocks.count + 1
    assert (job.blocks.count > 0).all()
    seen = times_seen((*places, len(number)), where, first, job.blocks.last)
    last, before = (x[..., None] for x in (blocks.last, blocks.last - blocks.count))
    want = ((number <= last) & (number > before))[:, None]
    np.testing.assert_array_equal(seen, np.broadcast_to(want, seen.shape))


@pytest.mark.parametrize("name", SHAPES)
def test_a_part_waits_for_what_is_left_to_it(name):
    """For each signal there is one wait, for the same tile, and by a program that starts later."""
    shape, _, _, batch, program, job = planned(name)
    places = BATCHES, shape.parts, HEADS
    part, last, rest, goes_on = job.piece.part, job.piece.last, job.piece.is_rest, job.piece.goes_on
    signals, waits, started = (np.full(places, -1) for _ in range(3))
    started[batch, part, job.head] = program
    assert (job.index[rest] == 0).all()  # a program leaves before it waits
    assert not (rest & goes_on).any()
    signals[batch[rest], part[rest], job.head[rest]] = job.tile.slot[rest]
    waiting = np.repeat(np.flatnonzero(goes_on), (last - part)[goes_on])
    times = np.arange(len(waiting)) - np.searchsorted(waiting, waiting)
    place = batch[waiting], part[waiting] + 1 + times, job.head[waiting]
    assert len(set(zip(*place, strict=True))) == len(waiting)
    waits[place] = job.tile.slot[waiting]
    np.testing.assert_array_equal(signals, waits)
    assert (started[place] < program[waiting]).all()


@pytest.mark.parametrize("name", SHAPES)
def test_no_part_has_more_than_its_share(name):
    shape, _, blocks, batch, program, job = planned(name)
    steps = np.zeros((BATCHES, shape.parts * HEADS), int)
    np.add.at(steps, (batch, program), job.blocks.count)
    cost = np.where(blocks.count > 0, blocks.count + split_kv.OVERHEAD, 0).sum(axis=1)
    share = np.maximum(-(-cost // shape.parts), split_kv.OVERHEAD + split_kv.FEWEST)
    assert (steps <= share[:, None]).all()


@pytest.mark.parametrize("name", SHAPES)
def test_partial_results_lie_inside_their_arrays(name):
    """Of both warpgroups, also where a sequence has more queries than a tile."""
    shape, _, _, _, _, job = planned(name)
    partial = job.piece.is_rest | job.piece.goes_on
    query = jax.ShapeDtypeStruct((shape.num_tokens, HEADS * shape.group, 128), BF16)
    _, _, part_out, part_state = kernel.results_of(shape, query)
    for warpgroup in range(2):
        has_rows = np.asarray(tiles.has_rows(shape, job.tile, warpgroup))
        for array in (part_out, part_state):
            assert warpgroup < array.shape[2] or not (partial & has_rows).any()


@pytest.mark.parametrize(("programs", "heads"), [(1, 1), (7, 3), (132, 8)])
def test_each_whole_tile_is_one_job(programs, heads):
    """For every head of keys; no program has more than one above another's."""
    sizes = 32 * 300, 4 * heads, heads, 128, 9, 16, 1, 1
    shape = Shape(*sizes, AttentionSpec(), with_lse=True)

    @jax.jit
    def found(count):
        numbers = jnp.arange(shape.max_tiles)[:, None]
        work = tiles.Table(jnp.tile(numbers, len(tiles.Tile._fields)), count[None])

        def of_program(me):
            mine = tile_tasks.whole_tiles(shape, programs, me, work)
            numbers = jnp.arange(300 * heads // programs + 2)
            job = jax.vmap(lambda i: mine.job_of(i, mine.look_up(i), i))(numbers)
            return numbers < mine.count, job.tile.slot, job.head

        return jax.vmap(of_program)(jnp.arange(programs, dtype=jnp.int32))

    for count in (0, 1, 2, 131, 132, 133, 300):
        there, row, head = map(np.asarray, found(jnp.int32(count)))
        seen = np.sort((row * heads + head)[there])
        np.testing.assert_array_equal(seen, np.arange(count * heads))
        assert np.ptp(there.sum(axis=1)) <= 1


def latents_of(num_tokens, num_seqs, programs, heads=64, **spec):
    sizes = num_tokens, heads, 999, 16, num_seqs, MAX_BLOCKS
    return Latents(*sizes, AttentionSpec(**spec), programs=programs)


LATENTS = {
    "one long": latents_of(1, 1, 13),
    "decodes": latents_of(9, 7, 5),
    "several queries": latents_of(20, 6, 16),
    "heads in two tiles": latents_of(12, 4, 13, heads=128, causal=False),
}


@functools.partial(jax.jit, static_argnums=0)
def pieces_of(shape, starts, seq_lens):
    """The tokens; each part's pieces and their number; the last piece and part of cut tokens."""
    work = latent_split.work_of(shape, rising(starts), seq_lens)
    numbers = jnp.arange(shape.num_tokens, dtype=jnp.int32)

    def of_part(part):
        count = work.parts[part, 3]
        found = jax.vmap(lambda i: latent_split.piece_at(part, i, work, jnp.int32(0)))(numbers)
        piece = latent_split.piece_at(part, count - 1, work, jnp.int32(0))
        return count, found, latent_split.last_part_of(work, piece.token)

    return work.tokens, *jax.vmap(of_part)(jnp.arange(shape.parts, dtype=jnp.int32))


@pytest.mark.parametrize("name", LATENTS)
def test_each_key_of_a_latent_cache_is_in_one_piece(name):
    """And what was cut is merged: of each token as many slots as were written for it."""
    shape = LATENTS[name]
    capacity, size = MAX_BLOCKS * 16, MAX_BLOCKS * 16 // KEYS + 1
    lengths = random_lengths(len(name), shape.num_seqs, 3, shape.num_tokens, capacity)
    found = jax.vmap(functools.partial(pieces_of, shape))(*lengths)
    tokens, counts, found, last_part = jax.tree.map(np.asarray, found)
    there = np.arange(shape.num_tokens) < counts[..., None]
    batch, part, index = np.nonzero(there)
    piece = jax.tree.map(lambda x: x[there], found)
    assert ((piece.steps > 0) & (piece.steps % 2 == 0)).all()

    number = np.arange(size)
    first, last = piece.last - piece.steps + 1, np.maximum(-(-piece.limit // KEYS), 1) - 1
    assert (last <= piece.last).all()
    places = BATCHES, shape.num_tokens, size
    seen = times_seen(places, (batch, piece.token), first, last)
    blocks = np.maximum(-(-tokens[:, :, 1] // KEYS), 1)
    np.testing.assert_array_equal(seen, number < blocks[..., None])

    is_cut = piece.slot >= 0
    written, merged = (np.full((BATCHES, shape.slots), -1) for _ in range(2))
    assert len(set(zip(batch[is_cut], piece.slot[is_cut], strict=True))) == is_cut.sum()
    written[batch[is_cut], piece.slot[is_cut]] = piece.token[is_cut]
    goes_on = (index == counts[batch, part] - 1) & (piece.slot == 2 * part + 1)
    merged[batch[goes_on], piece.slot[goes_on]] = piece.token[goes_on]
    for at in np.flatnonzero(goes_on):
        others = np.arange(part[at] + 1, last_part[batch[at], part[at]] + 1)
        merged[batch[at], 2 * others] = piece.token[at]
    np.testing.assert_array_equal(written, merged)

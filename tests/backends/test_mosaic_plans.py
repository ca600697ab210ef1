"""How the Mosaic kernels deal out their work, on thousands of random batches: all on the CPU.

Who computes which keys, who waits for whom, and where partial results lie: a kernel that is told
wrong stops for ever, or writes where others read. Lengths may be anything, as in jit they may.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from latent_items import latent_item
from mosaic_rules import BF16

from pagedattn import AttentionSpec
from pagedattn.backends.mosaic.dense import kernel, split_kv, tile_tasks, tiles
from pagedattn.backends.mosaic.dense.kernel_config import KernelConfig
from pagedattn.backends.mosaic.latents import split_kv as latent_split
from pagedattn.backends.mosaic.latents.kernel_config import KEYS
from pagedattn.backends.mosaic.latents.kernel_config import KernelConfig as Latents
from pagedattn.batch.metadata import nondecreasing

BATCHES, HEADS, MAX_BLOCKS = 2000, 2, 120  # of 16 keys


def config_of(num_seqs, parts, spec, *, longest, group, pad):
    """As `launch.config_of` makes it for sequences of so many queries at most."""
    num_tokens = max(8, num_seqs * longest + pad)
    sizes = num_tokens, HEADS * group, HEADS, 128, 999, 16, num_seqs, MAX_BLOCKS
    units = -(-longest // 8) * group
    return KernelConfig(*sizes, spec, with_lse=True, units=units, parts=parts)


CONFIGS = {
    "one long": config_of(1, 13, AttentionSpec(), longest=1, group=4, pad=0),
    "windows": config_of(7, 9, AttentionSpec(sliding_window=300), longest=8, group=1, pad=70),
    "more sequences than parts": config_of(20, 3, AttentionSpec(), longest=4, group=8, pad=5),
    "two warpgroups": config_of(
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
def plan(config, starts, seq_lens):
    """The tiles, and of every program the number of its tasks, and these, with some to spare."""
    starts = nondecreasing(starts)
    schedule = split_kv.schedule_of(config, starts, seq_lens)
    numbers = jnp.arange(config.max_tiles, dtype=jnp.int32)
    all_tiles = split_kv.tiles_of(config, starts, seq_lens)
    blocks = tiles.key_blocks(config, all_tiles)
    blocks = blocks._replace(count=jnp.where(split_kv.is_one(config, all_tiles), blocks.count, 0))

    def of_program(me):
        mine = split_kv.cut_tiles(config, me, schedule)
        return mine.count, jax.vmap(lambda i: mine.task_of(i, mine.look_up(i), i))(numbers)

    programs = jnp.arange(config.parts * HEADS, dtype=jnp.int32)
    return all_tiles, blocks, *jax.vmap(of_program)(programs)


@functools.cache
def planned(name):
    """The config, its tiles, their key blocks; of each task the batch, program and task."""
    config = CONFIGS[name]
    longest = config.units // config.group * 8
    capacity = config.max_blocks * config.block_size
    lengths = random_lengths(len(name), config.num_seqs, longest, config.num_tokens, capacity)
    found = jax.vmap(functools.partial(plan, config))(*lengths)
    all_tiles, blocks, counts, found = jax.tree.map(np.asarray, found)
    there = found.index < counts[..., None]
    batch, program, _ = np.nonzero(there)
    return config, all_tiles, blocks, batch, program, jax.tree.map(lambda x: x[there], found)


def times_seen(shape, where, first, last):
    """How often each number up to a size lies between a first and a last one, at every place."""
    edges = np.zeros((*shape[:-1], shape[-1] + 1), int)
    np.add.at(edges, (*where, first), 1)
    np.add.at(edges, (*where, last + 1), -1)
    return edges.cumsum(axis=-1)[..., :-1]


@pytest.mark.parametrize("name", CONFIGS)
def test_each_key_block_of_a_tile_is_in_one_job(name):
    config, _, blocks, batch, _, task = planned(name)
    number = np.arange(MAX_BLOCKS * 16 // config.keys + 1)
    places, where = (BATCHES, HEADS, config.max_tiles), (batch, task.head, task.tile.slot)
    first = task.blocks.last - task.blocks.count + 1
    assert (task.blocks.count > 0).all()
    seen = times_seen((*places, len(number)), where, first, task.blocks.last)
    last, before = (x[..., None] for x in (blocks.last, blocks.last - blocks.count))
    want = ((number <= last) & (number > before))[:, None]
    np.testing.assert_array_equal(seen, np.broadcast_to(want, seen.shape))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_part_waits_for_what_is_left_to_it(name):
    """For each signal there is one wait, for the same tile, and by a program that starts later."""
    config, _, _, batch, program, task = planned(name)
    places = BATCHES, config.parts, HEADS
    part, last, rest, goes_on = (
        task.work_item.part,
        task.work_item.last,
        task.work_item.is_rest,
        task.work_item.goes_on,
    )
    signals, waits, started = (np.full(places, -1) for _ in range(3))
    started[batch, part, task.head] = program
    assert (task.index[rest] == 0).all()  # a program leaves before it waits
    assert not (rest & goes_on).any()
    signals[batch[rest], part[rest], task.head[rest]] = task.tile.slot[rest]
    waiting = np.repeat(np.flatnonzero(goes_on), (last - part)[goes_on])
    times = np.arange(len(waiting)) - np.searchsorted(waiting, waiting)
    place = batch[waiting], part[waiting] + 1 + times, task.head[waiting]
    assert len(set(zip(*place, strict=True))) == len(waiting)
    waits[place] = task.tile.slot[waiting]
    np.testing.assert_array_equal(signals, waits)
    assert (started[place] < program[waiting]).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_no_part_has_more_than_its_share(name):
    config, _, blocks, batch, program, task = planned(name)
    steps = np.zeros((BATCHES, config.parts * HEADS), int)
    np.add.at(steps, (batch, program), task.blocks.count)
    cost = np.where(blocks.count > 0, blocks.count + split_kv.OVERHEAD, 0).sum(axis=1)
    share = np.maximum(-(-cost // config.parts), split_kv.OVERHEAD + split_kv.FEWEST)
    assert (steps <= share[:, None]).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_partial_results_lie_inside_their_arrays(name):
    """Of both warpgroups, also where a sequence has more queries than a tile."""
    config, _, _, _, _, task = planned(name)
    partial = task.work_item.is_rest | task.work_item.goes_on
    query = jax.ShapeDtypeStruct((config.num_tokens, HEADS * config.group, 128), BF16)
    _, _, part_out, part_state = kernel.results_of(config, query)
    for warpgroup in range(2):
        has_rows = np.asarray(tiles.has_rows(config, task.tile, warpgroup))
        for array in (part_out, part_state):
            assert warpgroup < array.shape[2] or not (partial & has_rows).any()


@pytest.mark.parametrize(("programs", "heads"), [(1, 1), (7, 3), (132, 8)])
def test_each_whole_tile_is_one_job(programs, heads):
    """For every head of keys; no program has more than one above another's."""
    sizes = 32 * 300, 4 * heads, heads, 128, 9, 16, 1, 1
    config = KernelConfig(*sizes, AttentionSpec(), with_lse=True)

    @jax.jit
    def found(count):
        numbers = jnp.arange(config.max_tiles)[:, None]
        schedule = tiles.Table(jnp.tile(numbers, len(tiles.Tile._fields)), count[None])

        def of_program(me):
            mine = tile_tasks.whole_tiles(config, programs, me, schedule)
            numbers = jnp.arange(300 * heads // programs + 2)
            task = jax.vmap(lambda i: mine.task_of(i, mine.look_up(i), i))(numbers)
            return numbers < mine.count, task.tile.slot, task.head

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
    "few heads": latents_of(9, 7, 24, heads=16),
}


@functools.partial(jax.jit, static_argnums=0)
def items_of(config, starts, seq_lens):
    """The tokens, and each part's items and their number."""
    schedule = latent_split.schedule_of(config, nondecreasing(starts), seq_lens)
    numbers = jnp.arange(config.num_tokens, dtype=jnp.int32)

    def of_part(part):
        found = jax.vmap(functools.partial(latent_item, config, schedule, part))(numbers)
        return schedule.parts[part, 3], found

    return schedule.tokens, *jax.vmap(of_part)(jnp.arange(config.parts, dtype=jnp.int32))


@pytest.mark.parametrize("name", LATENTS)
def test_each_key_of_a_latent_cache_is_in_one_piece(name):
    """And what was cut is joined: the parts of each token know each other, in a row."""
    config = LATENTS[name]
    capacity, size = MAX_BLOCKS * 16, MAX_BLOCKS * 16 // KEYS + 1
    lengths = random_lengths(len(name), config.num_seqs, 3, config.num_tokens, capacity)
    found = jax.vmap(functools.partial(items_of, config))(*lengths)
    tokens, counts, found = jax.tree.map(np.asarray, found)
    there = np.arange(config.num_tokens) < counts[..., None]
    batch, part, index = np.nonzero(there)
    work_item = jax.tree.map(lambda x: x[there], found)
    assert ((work_item.steps > 0) & (work_item.steps % config.steps_at_once == 0)).all()

    number = np.arange(size)
    first, last = (
        work_item.last - work_item.steps + 1,
        np.maximum(-(-work_item.limit // KEYS), 1) - 1,
    )
    assert (last <= work_item.last).all()
    places = BATCHES, config.num_tokens, size
    seen = times_seen(places, (batch, work_item.token), first, last)
    blocks = np.maximum(-(-tokens[:, :, 1] // KEYS), 1)
    np.testing.assert_array_equal(seen, number < blocks[..., None])

    np.testing.assert_array_equal(work_item.part, part)
    of_token = batch, work_item.token
    count = np.zeros((BATCHES, config.num_tokens), int)
    np.add.at(count, of_token, 1)
    assert (count[of_token] == work_item.last_part - work_item.first_part + 1).all()
    assert ((work_item.first_part <= part) & (part <= work_item.last_part)).all()
    assert (index == 0)[part > work_item.first_part].all()
    last_of_part = index == counts[batch, part] - 1
    assert last_of_part[part < work_item.last_part].all()

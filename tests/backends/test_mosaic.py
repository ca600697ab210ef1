"""The backend in Pallas Mosaic GPU: its tiles on the CPU, its programs up to the GPU's assembler.

On a Hopper GPU its results too, by the oracle.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SIGNED, SPECS, own_indices
from mosaic_rules import BF16, hopper

from pagedattn import AttentionSpec, KVCache, explain, init_kv_cache, make_batch, paged_attention
from pagedattn._dispatch.call import call_of
from pagedattn.backends.mosaic.dense import launch, lines, results, tiles
from pagedattn.backends.mosaic.dense.kernel_config import ROWS, UNIT, WARPGROUP, KernelConfig
from pagedattn.backends.mosaic.dense.launch import attend
from pagedattn.masks import descent_mask
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem
from pagedattn.testing.features import spec_of
from pagedattn.testing.running import attend_with_lse

WINDOW = AttentionSpec(sliding_window=100)

# As the backend runs them: inside jit. Eagerly each of their steps would be a program.
tiles_in_jit = jax.jit(tiles.schedule_of, static_argnums=0)
key_blocks_in_jit = jax.jit(tiles.key_blocks, static_argnums=0)
has_rows_in_jit = jax.jit(tiles.has_rows, static_argnums=0)
by_token_in_jit = jax.jit(results.by_token, static_argnums=0)

# query_lens, seq_lens: long, short, none, cross; with and without room for padding
BATCHES = (
    ([300], [300]),
    ([200, 1, 30], [900, 1, 333]),
    ([8, 3, 0, 129], [8, 400, 12, 129]),
    ([9, 16, 7], [20, 0, 7]),
    ([1] * 5, [1, 16, 17, 129, 128]),
)


def config_of(query_lens, spec, *, group=4, head_dim=128, pad=0, block_size=16):
    num_tokens = max(UNIT, sum(query_lens) + pad)
    sizes = num_tokens, 2 * group, 2, head_dim, 999, block_size, len(query_lens), 64
    return KernelConfig(*sizes, spec, with_lse=True)


def tiles_of(config, query_lens, seq_lens):
    """The tiles as rows of integers."""
    table, count = tiles_in_jit(config, *lengths(query_lens, seq_lens))
    return [tiles.Tile(*map(int, row)) for row in np.asarray(table)[: int(count[0])]]


def lengths(query_lens, seq_lens):
    starts = np.append(0, np.cumsum(query_lens))
    return jnp.asarray(starts, jnp.int32), jnp.asarray(seq_lens, jnp.int32)


def rows_of(config, tile):
    """Row, token in its sequence and query head in its group, of the rows that hold a token."""
    units = -(-tile.query_len // UNIT) * config.group
    for row in range(ROWS):
        unit = min(tile.first_unit + row // UNIT, units - 1)
        start = min(unit // config.group * UNIT, max(tile.query_len - UNIT, 0))
        token = start + row % UNIT
        if token < tile.query_len:
            yield row, token, unit % config.group


def blocks_of(config, tile):
    scalars = tiles.Tile(*map(np.int32, tile))
    return tiles.KeyBlocks(*map(int, key_blocks_in_jit(config, scalars)))


@pytest.mark.parametrize(("group", "pad"), [(1, 40), (3, 5), (4, 0), (20, 5)])
@pytest.mark.parametrize(("query_lens", "seq_lens"), BATCHES)
def test_tiles_hold_every_token(query_lens, seq_lens, group, pad):
    """Padding too, which has no keys; the longest come first; lse finds its way back.

    Warpgroups without rows hold none of them.
    """
    config = config_of(query_lens, AttentionSpec(), group=group, pad=pad)
    written = np.full((config.max_tiles, 2, ROWS), np.nan, np.float32)
    seen = np.zeros((config.num_tokens, group), bool)
    found = tiles_of(config, query_lens, seq_lens)
    for tile in found:
        computed = [has_rows_in_jit(config, tiles.Tile(*map(np.int32, tile)), i) for i in (0, 1)]
        for row, token, member in rows_of(config, tile):
            if not computed[row // WARPGROUP]:
                continue
            seen[tile.begin + token, member] = True
            written[tile.slot, :, row] = tile.begin + token + member / 32 + np.array([0, 0.5])
    steps = [blocks_of(config, tile).count for tile in found]
    assert seen.all()
    assert steps == sorted(steps, reverse=True)
    head = np.arange(2 * group)
    want = np.arange(config.num_tokens)[:, None] + head % group / 32 + head // group / 2
    got = by_token_in_jit(config, *lengths(query_lens, seq_lens), jnp.asarray(written))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("query_len", "want"), [(1, False), (16, False), (17, True), (300, True)])
def test_the_second_warpgroup_rests_in_short_tiles(query_len, want):
    config = config_of([query_len], AttentionSpec())
    (tile, *_) = tiles_of(config, [query_len], [300])
    assert tiles.has_rows(config, tile, 0)
    assert tiles.has_rows(config, tile, 1) == want


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize(("query_lens", "seq_lens"), BATCHES)
def test_key_blocks(query_lens, seq_lens, window, causal):
    """Those visited hold all visible keys, and no whole block in front or behind is wasted."""
    config = config_of(query_lens, AttentionSpec(causal=causal, sliding_window=window), pad=9)
    for tile in tiles_of(config, query_lens, seq_lens):
        last, count, full_begin, full_end = blocks_of(config, tile)
        position = tile.key_len - tile.query_len
        position = position + np.array([token for _, token, _ in rows_of(config, tile)])
        key = np.arange(tile.key_len + 2 * config.keys)
        apart = position[:, None] - key
        visible = (key < tile.key_len) & ((apart >= 0) | (not causal))
        visible &= abs(apart) < (window or 1 << 20)
        visited = (key // config.keys > last - count) & (key // config.keys <= last)
        common = (key // config.keys >= full_begin) & (key // config.keys < full_end)
        assert not visible[:, ~visited].any()
        assert visible[:, common].all()
        ends = {block for block in (last, last - count + 1) if visible.any()}
        assert all(visible[:, key // config.keys == block].any() for block in ends)
        assert visible.any() or count == 1


@pytest.mark.parametrize("starts", [[-5, 30, 10**6, 7], [0, 0, 0, 0], [9, 3, 2, 1]])
def test_bad_lengths_stay_inside_the_arrays(starts):
    config = config_of([20, 10, 3], WINDOW)
    seq_lens = jnp.array([10**6, -3, 2**31 - 1], jnp.int32)
    table, count = tiles_in_jit(config, jnp.array(starts, jnp.int32), seq_lens)
    rows = np.asarray(table)[: int(count[0])]
    assert 0 <= int(count[0]) <= config.max_tiles
    assert (rows[:, 1] >= 0).all()
    assert (rows[:, 1] + rows[:, 2] <= config.num_tokens).all()
    assert (rows[:, 3] <= config.max_blocks * config.block_size).all()


def refusals(head_dim=128, block_size=16, dtype=jnp.bfloat16):
    cache = init_kv_cache(4, block_size, 2, head_dim, dtype)
    batch = make_batch([3], [0], [[1]], block_size=block_size)
    return launch._unsupported_sizes(
        call_of(jnp.zeros((3, 4, head_dim), dtype), cache, batch, WINDOW)
    )


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"head_dim": 80}, "head_dim"),
        ({"head_dim": 320}, "head_dim"),
        ({"block_size": 12}, "block_size"),
        ({"block_size": 24}, "block_size"),
        ({"block_size": 192}, "block_size"),
        ({"dtype": jnp.float32}, "float32"),
    ],
)
def test_refusals(bad, named):
    assert named in refusals(**bad)[0]


def test_refuses_caps_that_its_tanh_is_too_coarse_for():
    cache, batch = init_kv_cache(4, 16, 2, 128), make_batch([3], [0], [[1]], block_size=16)
    query, spec = jnp.zeros((3, 4, 128), jnp.bfloat16), AttentionSpec(logits_soft_cap=1e6)
    (reason,) = launch._unsupported_cap(call_of(query, cache, batch, spec))
    assert "logits_soft_cap" in reason


@pytest.mark.usefixtures("on_cpu")
def test_refuses_other_devices():
    cache, batch = init_kv_cache(4, 16, 2, 128), make_batch([3], [0], [[1]], block_size=16)
    (reason,) = explain(jnp.zeros((3, 4, 128), jnp.bfloat16), cache, batch)["mosaic"]
    assert reason == "mosaic runs on cuda, the query lies on cpu"


def placed(query, cache):
    """Arrays of those shapes, which lie somewhere."""
    return jax.tree.map(lambda config: jnp.zeros(config.shape, config.dtype), (query, cache))


def lower(
    spec=SPECS["plain"],
    *,
    head_dim=128,
    block_size=16,
    dtype=jnp.bfloat16,
    heads=(4, 2),
    query_lens=(290, 10),
    parents=None,
):
    """The call as XLA would hand it to the GPU's assembler."""
    num_heads, num_kv_heads = heads
    planes = [jax.ShapeDtypeStruct((9, block_size, num_kv_heads, head_dim), dtype)] * 2
    query = jax.ShapeDtypeStruct((sum(query_lens), num_heads, head_dim), dtype)
    tables = [range(2, 41), [0, 1]]
    batch = make_batch(query_lens, [0, 0], tables, block_size=block_size, parents=parents)
    call = call_of(*placed(query, KVCache(*planes)), batch, spec, return_lse=True)
    traced = attend.trace(call, query, KVCache(*planes), batch, 132)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.lowers
@pytest.mark.parametrize("name", SPECS)
def test_every_feature_lowers(name):
    assert "mosaic_gpu" in lower(SPECS[name])


@pytest.mark.lowers
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_every_head_dim_lowers(head_dim, dtype):
    assert "mosaic_gpu" in lower(head_dim=head_dim, dtype=dtype)


@pytest.mark.lowers
@pytest.mark.parametrize("block_size", [8, 32, 64, 128, 256])
def test_every_block_size_lowers(block_size):
    assert "mosaic_gpu" in lower(WINDOW, block_size=block_size)


@pytest.mark.lowers
@pytest.mark.parametrize(
    ("heads", "name"),
    [
        *((heads, name) for heads in ((2, 2), (40, 2)) for name in ("plain", "all")),
        *(((7, 1), name) for name in ("plain", "sliding_window", "alibi_slopes", "causal=False")),
    ],
)
def test_every_group_lowers(heads, name):
    assert "mosaic_gpu" in lower(spec_of(name, heads[0]), heads=heads)


@pytest.mark.lowers
@pytest.mark.parametrize("query_lens", [(290, 10), (9, 1)])
@pytest.mark.parametrize("name", ["plain", "sliding_window", "alibi_slopes", "all"])
def test_trees_lower(name, query_lens):
    """Whole tiles and cut keys, with positions that matter and without."""
    parents = np.concatenate([(np.arange(n) - 1) // 2 for n in query_lens])
    assert "mosaic_gpu" in lower(SPECS[name], query_lens=query_lens, parents=parents)


@pytest.mark.parametrize(("longest", "refused"), [(8192, False), (8193, True)])
def test_refuses_lines_whose_words_would_take_too_much(longest, refused):
    cache, query = init_kv_cache(4, 16, 2, 128), jnp.zeros((3, 4, 128), jnp.bfloat16)
    sizes = {"block_size": 16, "parents": [-1, 0, 0]}
    call = call_of(query, cache, make_batch([3], [0], [[1]], **sizes), AttentionSpec())
    reasons = launch._unsupported_lines(dataclasses.replace(call, max_query_len=longest))
    assert [reason.startswith("parents: ") for reason in reasons] == [True] * refused


def key_words_of(query_lens, seq_lens, head_dim, seed):
    """The config, its tiles, their words, and the batch, of random trees."""
    sizes = {"head_dim": 8, "num_heads": 1, "num_kv_heads": 1, "parents": True, "seed": seed}
    batch = batch_of(random_problem(query_lens, seq_lens, AttentionSpec(), **sizes))
    config = config_of(query_lens, AttentionSpec(), group=3, head_dim=head_dim)
    config = dataclasses.replace(config, words=batch.tree.ancestors.shape[1])
    lens = batch.query_start_loc, batch.seq_lens
    found = jax.jit(tiles.tiles_of, static_argnums=0)(config, *lens)
    in_jit = jax.jit(lines.lines_of, static_argnums=0)
    return config, found, in_jit(config, batch.tree, found).words, batch


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize(("query_lens", "seq_lens"), BATCHES)
def test_words_say_which_keys_a_row_sees(query_lens, seq_lens, head_dim):
    """Every bit of a step at the new tokens is what `descent_mask` says of row and key."""
    config, found, words, batch = key_words_of(query_lens, seq_lens, head_dim, seed=3)
    words, ancestors = np.asarray(words), np.asarray(batch.tree.ancestors)
    shown = (words[..., None, :] >> np.arange(32)[:, None]) & 1  # [tiles, 2, words, 32, 64]
    shown = shown.reshape(*words.shape[:2], -1, WARPGROUP)
    for tile in map(tiles.Tile._make, np.stack(found, 1)):
        if tile.sequence >= len(query_lens) or tile.query_len == 0:
            continue
        context = tile.key_len - tile.query_len
        own = np.arange(shown.shape[2]) - config.keys - context % 32
        for row, token, _ in rows_of(config, tile):
            want = descent_mask(ancestors[tile.begin + token][None], own)[0]
            want &= own < tile.query_len
            half, place = divmod(row, WARPGROUP)
            np.testing.assert_array_equal(shown[tile.slot, half, :, place] == 1, want)


def check(query_lens, seq_lens, spec, **sizes):
    sizes = {"head_dim": 128, "block_size": 16, "dtype": BF16} | sizes
    problem = random_problem(query_lens, seq_lens, spec, **sizes)
    arrays = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    got = paged_attention(*arrays, spec, backend="mosaic", return_lse=True)
    assert_attention_close(*got, problem, name="mosaic")


@hopper
@pytest.mark.parametrize(("query_lens", "seq_lens"), BATCHES)
@pytest.mark.parametrize("name", SPECS)
def test_every_feature(name, query_lens, seq_lens):
    check(query_lens, seq_lens, SPECS[name], pad_tokens=sum(query_lens) + 20)


@hopper
@pytest.mark.parametrize("dtype", [BF16, np.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("block_size", [8, 64, 256])
def test_sizes(block_size, head_dim, dtype):
    spec = AttentionSpec(sliding_window=100, alibi_slopes=SIGNED)
    check(*BATCHES[1], spec, block_size=block_size, head_dim=head_dim, dtype=dtype)


TREES = (*BATCHES, ([9, 8, 1, 2, 0], [300, 530, 77, 3, 5]), ([64] * 3, [64, 1024, 300]))


@hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("query_lens", "seq_lens"), TREES)
@pytest.mark.parametrize("name", ["plain", "sliding_window", "alibi_slopes", "all"])
def test_trees(name, query_lens, seq_lens, head_dim):
    sizes = {"head_dim": head_dim, "pad_tokens": sum(query_lens) + 20}
    check(query_lens, seq_lens, SPECS[name], parents=True, **sizes)


@hopper
@pytest.mark.parametrize(("query_lens", "seq_lens"), TREES)
@pytest.mark.parametrize("name", ["plain", "all"])
def test_a_chain_is_causal_attention_in_every_bit(name, query_lens, seq_lens):
    sizes = {"head_dim": 128, "block_size": 16, "dtype": BF16}
    problem = random_problem(query_lens, seq_lens, SPECS[name], **sizes)
    chain = problem.replace(parents=own_indices(problem) - 1)
    both = (attend_with_lse(p, "mosaic", True) for p in (chain, problem))
    for got, want in zip(*both, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@hopper
@pytest.mark.parametrize("heads", [(2, 2), (7, 1), (40, 2)])
def test_groups(heads):
    num_heads, num_kv_heads = heads
    check(*BATCHES[2], SPECS["plain"], num_heads=num_heads, num_kv_heads=num_kv_heads)


@hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("programs", [1, 2, 3])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_several_tiles_a_program(name, programs, head_dim):
    sizes = {"head_dim": head_dim, "block_size": 16, "dtype": BF16}
    problem = random_problem([200, 1, 30, 9], [290, 1, 333, 9], SPECS[name], **sizes)
    arrays = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    call = call_of(*arrays, problem.spec, return_lse=True)
    assert_attention_close(*attend(call, *arrays, programs), problem)


@hopper
def test_bad_values_stay_inside_the_arrays():
    problem = random_problem(
        [200, 1, 30],
        [900, 1, 333],
        SPECS["plain"],
        head_dim=128,
        dtype=BF16,
        block_size=16,
        poison=None,
    )
    batch = batch_of(problem)
    wild = jnp.full_like(batch.block_tables, 2**31 - 1).at[1].set(-3)
    bad = dataclasses.replace(batch, block_tables=wild, seq_lens=jnp.full(3, 10**6, jnp.int32))
    arrays = jnp.asarray(problem.query), cache_of(problem)
    call = call_of(*arrays, bad, problem.spec, return_lse=True)
    out, _ = launch.run(call, *arrays, bad)
    assert jnp.isfinite(out).all()
    starts = jnp.array([-5, 30, 10**6, 7], jnp.int32)
    bad = dataclasses.replace(bad, query_start_loc=starts)
    jax.block_until_ready(launch.run(call, *arrays, bad))

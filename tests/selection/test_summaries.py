"""Summaries of blocks: what they say of the keys, and that steps keep them up to date."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import (
    AttentionSpec,
    BlockSummaries,
    InvalidInputError,
    KVCache,
    make_batch,
    score_blocks,
    select_blocks,
    summarise_blocks,
    update_summaries,
    write_kv,
)
from pagedattn.selection import kernels
from pagedattn.selection.summaries import DTYPES, KINDS, rounded_down
from pagedattn.testing import batch_of, cache_of, oracle, random_problem
from pagedattn.testing.random_problems import random_tables

SIZE = 4
CACHES = {
    "plain": {},
    "scales of heads": {"cache_dtype": "int8"},
    "per-token scales": {"cache_dtype": "int8", "token_scales": True},
    "int4": {"cache_dtype": "int4", "token_scales": True},
}
WAYS = {"as here": kernels.BACKENDS, "by XLA": {}}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Scores by the device's own kernel, if it has one, and by XLA."""
    monkeypatch.setattr(kernels, "BACKENDS", WAYS[request.param])


def dequantised(problem, block):
    """The keys of a block in float64."""
    keys, scale = oracle.numbers(problem.key_cache[block]), problem.key_scale
    if scale is None:
        return keys
    scales = scale[block] if problem.token_scales else [scale] * SIZE
    return np.stack(
        [row * oracle.factors(s, row.shape) for row, s in zip(keys, scales, strict=True)]
    )


def by_tokens(problem, kind):
    """Each block's summary in float64, of the tokens that its sequence has; None without any."""
    found = [None] * len(problem.key_cache)
    for table, seq_len in zip(problem.block_tables, problem.seq_lens, strict=True):
        for column in range(-(-seq_len // SIZE)):
            keys = dequantised(problem, int(table[column]))[: seq_len - SIZE * column]
            rows = (keys.min(0), keys.max(0)) if kind == "range" else (keys.mean(0),)
            found[table[column]] = rows
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("cache", CACHES)
@given(lens=st.lists(st.integers(0, 21), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_a_summary_is_that_of_the_tokens_that_a_block_has(kind, dtype, cache, lens, seed):
    """Slots past a sequence's end hold NaN."""
    queries = [min(n, 1) for n in lens]
    sizes = {"dtype": dtype, "seed": seed, "num_blocks": 24, **CACHES[cache]}
    problem = random_problem(queries, lens, AttentionSpec(), block_size=SIZE, **sizes)
    got = summarise_blocks(cache_of(problem), batch_of(problem), kind=kind)
    exact = kind == "range" and cache == "plain"
    unit = 2**-7 if kind == "range" else 2**-8  # bounds are rounded away from the keys
    tolerance = 0 if exact else 1e-6 if got.planes[0].dtype == np.float32 else unit
    for block, rows in enumerate(by_tokens(problem, kind)):
        for plane, row in zip(got.planes, rows or (), strict=rows is not None):
            plane = np.asarray(plane[block], float)
            np.testing.assert_allclose(plane, row, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache", CACHES)
@given(lens=st.lists(st.integers(0, 21), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_keys_lie_within_bounds_of_any_dtype(dtype, cache, lens, seed):
    """And no number of the dtype is nearer to the least or the greatest of them."""
    queries = [min(n, 1) for n in lens]
    sizes = {"seed": seed, "num_blocks": 24, **CACHES[cache]}
    problem = random_problem(queries, lens, AttentionSpec(), block_size=SIZE, **sizes)
    got = summarise_blocks(cache_of(problem), batch_of(problem), dtype=dtype)
    assert {plane.dtype for plane in got.planes} == {jnp.dtype(dtype)}
    for block, rows in enumerate(by_tokens(problem, "range")):
        if rows is not None:
            low, high = (np.asarray(plane[block], np.float32) for plane in got.planes)
            least, greatest = (row.astype(np.float32) for row in rows)
            np.testing.assert_array_equal(low, below(least, dtype))
            np.testing.assert_array_equal(high, -below(-greatest, dtype))


def below(numbers, dtype):
    """The greatest numbers of a dtype that are not above others, by a table of all of them."""
    if dtype == "float32":
        return numbers
    bits = np.dtype(f"u{jnp.dtype(dtype).itemsize}")
    every = np.arange(1 << 8 * bits.itemsize, dtype=bits).view(jnp.dtype(dtype)).astype(np.float32)
    every = np.unique(every[np.isfinite(every)])
    return every[np.maximum(np.searchsorted(every, numbers, side="right") - 1, 0)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_every_number_is_rounded_down(dtype):
    """All of a dtype, their neighbours in float32, and what is beyond; zeros have no sign."""
    largest = float(jnp.finfo(dtype).max)
    bits = np.dtype(f"u{jnp.dtype(dtype).itemsize}")
    every = np.arange(1 << 8 * bits.itemsize, dtype=bits).view(jnp.dtype(dtype)).astype(np.float32)
    every = every[np.isfinite(every)]
    near = [np.nextafter(every, np.float32(way)) for way in (-np.inf, np.inf)]
    numbers = np.clip(np.concatenate([every, *near]), -largest, largest)
    got = np.asarray(rounded_down(jnp.asarray(numbers), jnp.dtype(dtype)), np.float32)
    # XLA takes subnormal float32 for 0.
    normal = np.abs(numbers) >= np.finfo(np.float32).tiny
    np.testing.assert_array_equal(got[normal], below(numbers, dtype)[normal])
    beyond = rounded_down(jnp.asarray([1e30, -1e30, jnp.nan]), jnp.dtype("float8_e4m3fn"))
    np.testing.assert_array_equal(np.asarray(beyond, np.float32), [448, -448, np.nan])


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_steps_of_any_lengths_keep_them_up_to_date_in_every_bit(kind, data):
    """After each step those of the blocks in use are what they would be, computed anew."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    steps = data.draw(st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), max_size=4))
    tables = np.array(random_tables(rng, [6, 6, 6], 20), np.int32)
    empty = np.full((20, SIZE, 2, 8), np.nan, np.float32)
    cache = KVCache(*map(jnp.asarray, (empty, empty)))
    nothing = jnp.full((20, 2, 8), 7.0)
    summaries = BlockSummaries((nothing,) * (2 if kind == "range" else 1))
    lens, used = np.zeros(3, int), set()
    for step in steps:
        sizes = {"block_size": SIZE, "pad_tokens": 19, "max_query_len": 6, "pad_seqs": 4}
        batch = make_batch(step, lens.tolist(), tables, **sizes)
        lens = lens + step
        new = jnp.asarray(rng.standard_normal((2, 19, 2, 8)), jnp.float32)
        cache = write_kv(cache, *new, batch.slot_mapping)
        summaries = jax.jit(update_summaries)(summaries, cache, batch)
        used |= {int(b) for row, n in zip(tables, lens, strict=True) for b in row[: -(-n // SIZE)]}
        anew = summarise_blocks(cache, batch, kind=kind)
        for got, want in zip(summaries.planes, anew.planes, strict=True):
            mine = np.isin(np.arange(20), sorted(used))
            np.testing.assert_array_equal(got[mine], want[mine])
            np.testing.assert_array_equal(got[~mine], 7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache", CACHES)
def test_an_update_reads_scales_as_a_summary_does(kind, cache):
    sizes = {"block_size": SIZE, "num_blocks": 24, **CACHES[cache]}
    problem = random_problem([5, 21], [5, 21], AttentionSpec(), **sizes)
    batch, cache = batch_of(problem), cache_of(problem)
    want = summarise_blocks(cache, batch, kind=kind)
    nothing = jax.tree.map(lambda plane: jnp.full_like(plane, 7), want)
    got = update_summaries(nothing, cache, batch)
    written = sorted({int(b) for row in problem.block_tables for b in row})
    for plane, other in zip(got.planes, want.planes, strict=True):
        np.testing.assert_array_equal(plane[np.array(written)], other[np.array(written)])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache", CACHES)
def test_jax_may_be_told_to_promote_nothing(kind, cache):
    sizes = {"block_size": SIZE, "num_blocks": 24, **CACHES[cache]}
    problem = random_problem([1, 3], [5, 21], AttentionSpec(), **sizes)
    batch, cache, query = batch_of(problem), cache_of(problem), jnp.asarray(problem.query)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        summaries = update_summaries(summarise_blocks(cache, batch, kind=kind), cache, batch)
        select_blocks(score_blocks(query, summaries, batch), batch, 2)


@pytest.mark.optimised
def test_an_update_is_in_place():
    """The planes of donated summaries are those of the result, in bfloat16 too."""
    cache = KVCache(*jnp.ones((2, 512, 16, 2, 64), jnp.bfloat16))
    batch = make_batch([1], [40], [[5, 9, 2]], block_size=16)
    summaries = jax.block_until_ready(summarise_blocks(cache, batch))
    before = [plane.unsafe_buffer_pointer() for plane in summaries.planes]
    after = jax.jit(update_summaries, donate_argnums=0)(summaries, cache, batch)
    assert [plane.unsafe_buffer_pointer() for plane in after.planes] == before


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("few", [False, True], ids=["as the cache", "eight bits"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@given(seed=st.integers(0, 999), dim=st.sampled_from([16, 100, 128]))
def test_scores_are_bounds_or_estimates_of_the_logits(kind, few, dtype, seed, dim):
    """By explicit loops over tokens and heads; -inf where a sequence has no block or no query."""
    sizes = {"block_size": SIZE, "max_query_len": 3, "dtype": jnp.dtype(dtype).type}
    sizes["head_dim"] = dim
    problem = random_problem([1, 3, 0], [9, 22, 5], AttentionSpec(), seed=seed, **sizes)
    batch, cache = batch_of(problem), cache_of(problem)
    summaries = summarise_blocks(cache, batch, kind=kind, dtype="float8_e4m3fn" if few else dtype)
    got = np.asarray(score_blocks(problem.query, summaries, batch))
    planes = [np.asarray(plane, np.float32) for plane in summaries.planes]
    assert got.shape == (3, 2, batch.max_blocks)
    for s, (table, seq_len) in enumerate(zip(problem.block_tables, problem.seq_lens, strict=True)):
        rows = problem.query[slice(*problem.query_start_loc[s : s + 2])].astype(np.float32)
        for kv_head in range(2):
            q = rows[:, 2 * kv_head : 2 * kv_head + 2].reshape(-1, dim)
            for column in range(batch.max_blocks):
                if not len(q) or SIZE * column >= seq_len:
                    assert got[s, kv_head, column] == -np.inf
                    continue
                keys = problem.key_cache[table[column], : seq_len - SIZE * column, kv_head]
                low, high = (plane[table[column], kv_head] for plane in (planes[0], planes[-1]))
                want = np.maximum(q * low, q * high).sum(-1).max()
                if kind == "range":
                    most = (q @ keys.astype(np.float32).T).max()
                    assert got[s, kv_head, column] >= most - 1e-4
                np.testing.assert_allclose(got[s, kv_head, column], want, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("max_blocks", [1, 256, 300, 513])
def test_scores_of_long_tables(max_blocks):
    """They are computed some blocks at a time."""
    rng = np.random.default_rng(0)
    planes = jnp.sort(jnp.asarray(rng.standard_normal((2, max_blocks, 1, 8))), axis=0)
    batch = make_batch([1], [max_blocks - 1], [rng.permutation(max_blocks)], block_size=1)
    query = rng.standard_normal((1, 2, 8)).astype(np.float32)
    got = score_blocks(query, BlockSummaries(tuple(planes)), batch)
    low, high = np.asarray(planes)[:, batch.block_tables[0], 0]
    want = np.maximum(query[0, :, None] * low, query[0, :, None] * high).sum(-1).max(0)
    np.testing.assert_allclose(got[0, 0], want, rtol=1e-5, atol=1e-5)


def test_scores_have_no_gradients(way):
    summaries = BlockSummaries((jnp.ones((2, 1, 3)), jnp.ones((2, 1, 3))))
    batch = make_batch([1], [7], [[1, 0]], block_size=4)

    def loss(query, summaries):
        scores = score_blocks(query, summaries, batch)
        return scores.sum() + select_blocks(scores, batch, 2).blocks.sum()

    found = jax.grad(loss, (0, 1))(jnp.ones((1, 1, 3)), summaries)
    assert not any(jnp.any(gradient) for gradient in jax.tree.leaves(found))


def test_what_does_not_fit_is_refused():
    cache, batch = KVCache(*jnp.ones((2, 3, 4, 2, 8))), make_batch([1], [4], [[0, 2]], block_size=4)
    summaries, query = summarise_blocks(cache, batch), jnp.ones((1, 4, 8))
    with pytest.raises(InvalidInputError, match="kind must be one of"):
        summarise_blocks(cache, batch, kind="median")
    for dtype in ("int8", "float8_e5m2", 3):
        with pytest.raises(InvalidInputError, match="dtype must be one of"):
            summarise_blocks(cache, batch, dtype=dtype)
    with pytest.raises(InvalidInputError, match="summaries must be BlockSummaries"):
        update_summaries(cache, cache, batch)
    with pytest.raises(InvalidInputError, match="summaries must be those of the cache"):
        update_summaries(summaries, KVCache(*jnp.ones((2, 4, 4, 2, 8))), batch)
    for wrong in (query[0], query[..., :4], jnp.ones((2, 4, 8)), jnp.ones((1, 3, 8))):
        with pytest.raises(InvalidInputError, match=r"query must be"):
            score_blocks(wrong, summaries, batch)


def test_a_batch_that_writes_nothing_changes_nothing():
    """Of a sequence that shares its block with a longer one, too."""
    key = jnp.arange(8.0).reshape(1, 8, 1, 1)
    cache = KVCache(key, key)
    summaries = summarise_blocks(cache, make_batch([1], [7], [[0]], block_size=8))
    reading = make_batch([1, 1], None, [[0], [0]], key_lens=[8, 3], block_size=8)
    updated = update_summaries(summaries, cache, reading)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, updated, summaries))


ROW = jnp.ones((1, 1, 4))
NO_PLANES = {
    "none": (),
    "three": (ROW, ROW, ROW),
    "a list": ([1.0],),
    "nothing": (None,),
    "two axes": (ROW[0],),
    "no heads": (ROW[:, :0],),
    "integers": (ROW.astype(int),),
    "complex numbers": (ROW * 1j,),
    "of two kinds": (ROW, ROW.astype(jnp.bfloat16)),
    "no array": ROW,
}


@pytest.mark.parametrize("name", NO_PLANES)
def test_what_holds_no_summaries_is_refused(name):
    batch = make_batch([1], [3], [[0]], block_size=4)
    cache = KVCache(ROW[:, None].repeat(4, 1), ROW[:, None].repeat(4, 1))
    summaries = BlockSummaries(NO_PLANES[name])
    with pytest.raises(InvalidInputError):
        score_blocks(ROW, summaries, batch)
    with pytest.raises(InvalidInputError):
        update_summaries(summaries, cache, batch)


def test_summaries_given_away_are_named():
    batch, given = make_batch([1], [3], [[0]], block_size=4), ROW + 1
    given.delete()
    with pytest.raises(InvalidInputError, match="given away"):
        score_blocks(ROW, BlockSummaries((given,)), batch)

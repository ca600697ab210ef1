"""Blocks behind a window are given back, and nothing that a query may see is missing then."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_same
from hypothesis import given

import pagedattn as pa
from pagedattn._arrays.namespace import cdiv
from pagedattn.testing import reference_attention

MAX_SEQS, BLOCK_SIZE, MAX_BLOCKS, NEW, HEAD_DIM = 3, 4, 8, 5, 4
CAPACITY, NUM_TOKENS = MAX_BLOCKS * BLOCK_SIZE, MAX_SEQS * NEW
SIZES = {"max_seqs": MAX_SEQS, "max_blocks": MAX_BLOCKS}
WINDOWS = (1, 3, 4, 6, 9)
STEPS = st.lists(st.tuples(*[st.integers(0, NEW)] * MAX_SEQS), min_size=1, max_size=12)


RNG = np.random.default_rng(0)
# query, key and value of each token that a sequence may ever have
VECTORS = [
    RNG.standard_normal((MAX_SEQS, CAPACITY, heads, HEAD_DIM)).astype(np.float32)
    for heads in (2, 1, 1)
]


def i32(*values):
    return jnp.array(values, jnp.int32)


def empty_cache(num_blocks):
    """Holds NaN, so that any block that is read unwritten shows."""
    return pa.KVCache(*[jnp.full((num_blocks, BLOCK_SIZE, 1, HEAD_DIM), jnp.nan)] * 2)


@functools.partial(jax.jit, static_argnames="window")
def step(pool, cache, rows, new, window):
    """Attends to new tokens, then gives blocks back, which hold NaN from then on."""
    query, key, value = rows
    pool, batch, growth = pa.next_batch(pool, new, num_tokens=len(query), max_query_len=NEW)
    cache = pa.write_kv(cache, key, value, batch.slot_mapping)
    spec = pa.AttentionSpec(sliding_window=window)
    out = pa.paged_attention(query, cache, batch, spec, backend="xla")
    held = (pool.ref_counts > 0).sum()
    pool, freed = pa.release_behind(pool, window, max_new_tokens=NEW)
    cache = pa.fill_blocks(cache, freed, jnp.nan)
    return pool, cache, out, growth.ok.all(), held


def packed(vectors, lens, new):
    """Those of the new tokens of all sequences, padded with NaN."""
    rows = [vectors[s, n : n + count] for s, (n, count) in enumerate(zip(lens, new, strict=True))]
    padding = np.full((NUM_TOKENS - sum(new), *vectors.shape[2:]), np.nan, np.float32)
    return np.concatenate([*rows, padding])


def expected(lens, new, window):
    """By the oracle, over a cache in which every token of a sequence stays where it is."""
    query, *planes = VECTORS
    planes = [plane.reshape(-1, 1, 1, HEAD_DIM) for plane in planes]  # blocks of one token
    tables = np.arange(MAX_SEQS * CAPACITY).reshape(MAX_SEQS, CAPACITY)
    totals = np.add(lens, new)
    starts = np.concatenate([[0], np.cumsum(new)])
    spec = pa.AttentionSpec(sliding_window=window)
    return reference_attention(packed(query, lens, new), *planes, tables, totals, starts, spec)[0]


@given(window=st.sampled_from(WINDOWS), steps=STEPS)
def test_attention_is_as_if_nothing_were_released(window, steps):
    """Nor does a sequence hold more than its window and what it has just brought."""
    pool, cache = pa.init_block_pool(17, BLOCK_SIZE, **SIZES), empty_cache(17)
    lens = [0] * MAX_SEQS
    for new in steps:
        new = [min(n, CAPACITY - length) for n, length in zip(new, lens, strict=True)]
        rows = [packed(vectors, lens, new) for vectors in VECTORS]
        pool, cache, out, ok, held = step(pool, cache, rows, i32(*new), window)
        assert ok
        np.testing.assert_allclose(out, expected(lens, new, window), atol=1e-5)
        lens = [length + n for length, n in zip(lens, new, strict=True)]
        most = cdiv(window, BLOCK_SIZE) + 1
        assert held <= sum(most + cdiv(n, BLOCK_SIZE) for n in new)
        used = np.arange(MAX_BLOCKS) < cdiv(np.array(lens), BLOCK_SIZE)[:, None]
        assert ((used & (np.asarray(pool.block_tables) >= 0)).sum(axis=1) <= most).all()


def test_two_sequences_go_on_in_the_blocks_that_they_give_back():
    """One compiled scan. The second writes NaN alone, which would show in the first."""
    pool, cache = pa.init_block_pool(4, BLOCK_SIZE, **SIZES), empty_cache(4)
    new, window = [1, 1, 0], 5
    lens = [[n, n, 0] for n in range(CAPACITY)]
    rows = [np.stack([packed(vectors, n, new) for n in lens]) for vectors in VECTORS]
    for array in rows:
        array[:, 1] = np.nan

    def one(carry, rows):
        pool, cache, out, ok, held = step(*carry, rows, i32(*new), window)
        return (pool, cache), (out[0], ok, held)

    (pool, _), (out, ok, held) = jax.lax.scan(one, (pool, cache), rows)
    assert ok.all()
    assert held.max() == 4  # of the 16 that hold all their tokens
    np.testing.assert_allclose(out, [expected(n, new, window)[0] for n in lens], atol=1e-5)


def grown(lens=(10, 3, 0), num_blocks=6):
    pool = pa.init_block_pool(num_blocks, BLOCK_SIZE, **SIZES)
    return pa.append_tokens(pool, i32(*lens))[0]


@pytest.mark.parametrize(
    ("window", "kept"), [(1, 1), (2, 1), (3, 1), (4, 2), (6, 2), (7, 2), (8, 3), (99, 3)]
)
def test_which_blocks_are_behind(window, kept):
    """Of ten tokens in blocks of 4, by hand: position 10 sees 10 - window + 1, ..., 10."""
    pool, freed = pa.release_behind(grown(), window)
    assert (pool.block_tables[0, :3] >= 0).tolist() == [False] * (3 - kept) + [True] * kept
    assert int(pool.num_free) == 2 + (3 - kept)
    assert freed.shape == pool.block_tables.shape
    again, freed = pa.release_behind(pool, window)
    assert (freed == -1).all()
    assert_same(pool, again)


def test_blocks_that_others_hold_are_not_freed():
    pool, _ = pa.fork(grown(), i32(0), i32(2))
    pool = pa.hold_blocks(pool, pool.block_tables[0, :1])
    first, second = pool.block_tables[0, :2].tolist()
    pool, freed = pa.release_behind(pool, 2)
    assert freed[freed >= 0].tolist() == [second]  # once, though two rows gave it back
    assert pool.ref_counts[jnp.array([first, second])].tolist() == [1, 0]
    pool, freed = pa.drop_blocks(pool, i32(first))
    assert freed.tolist() == [first]


def test_a_prefix_may_lack_its_first_blocks():
    """What is behind the window of a sequence is behind that of one that begins alike."""
    pool, _ = pa.release_behind(grown(), 4)
    pool, made = pa.share_blocks(pool, 2, pool.block_tables[0, :2], 8)
    assert made
    assert pool.block_tables[2, :2].tolist() == pool.block_tables[0, :2].tolist()
    assert int(pool.ref_counts[pool.block_tables[0, 1]]) == 2


def test_a_swap_takes_no_blocks_for_what_was_given_back():
    pool, _ = pa.release_behind(grown(), 2)
    host = pa.init_block_pool(1, BLOCK_SIZE, **SIZES)
    pool, host, swap = pa.swap_out(pool, host, i32(0), i32(1))
    assert swap.ok.all()
    assert host.block_tables[1, :3].tolist() == [-1, -1, 0]
    assert host.seq_lens.tolist() == [0, 10, 0]
    pool, host, swap = pa.swap_in(pool, host, i32(1), i32(0))
    assert swap.ok.all()
    assert (pool.block_tables[0, :3] >= 0).tolist() == [False, False, True]
    assert int(pool.num_free) == 4


def test_a_swap_that_finds_no_room_changes_nothing():
    pool, _ = pa.release_behind(grown(), 4)
    host = pa.init_block_pool(1, BLOCK_SIZE, **SIZES)
    after, host_after, swap = pa.swap_out(pool, host, i32(0), i32(1))
    assert not swap.ok.any()
    assert host_after.seq_lens.tolist() == [0, 0, 0]
    assert int(host_after.num_free) == 1
    assert_same(pool, after)


def test_a_row_is_as_long_as_its_table_all_the_same():
    pool, _ = pa.release_behind(grown((CAPACITY, 0, 0), 8), 2)
    _, growth = pa.append_tokens(pool, i32(1, 0, 0))
    assert growth.ok.tolist() == [False, True, True]


def test_an_attention_that_would_see_what_was_given_back_is_refused():
    pool, _ = pa.release_behind(grown(), 4)
    batch = pa.batch_from_pool(pool, i32(1, 0, 0), num_tokens=1, max_query_len=1)
    query = jnp.ones((1, 2, HEAD_DIM))
    cache = pa.KVCache(*[jnp.ones((6, BLOCK_SIZE, 1, HEAD_DIM))] * 2)
    pa.paged_attention(query, cache, batch, pa.AttentionSpec(sliding_window=4), backend="xla")
    for spec in (pa.AttentionSpec(), pa.AttentionSpec(sliding_window=7)):
        with pytest.raises(pa.InvalidInputError, match="release_behind"):
            pa.paged_attention(query, cache, batch, spec, backend="xla")


def test_what_exceeds_the_static_bound_is_given_back_later():
    pool = grown((25, 3, 0), 8)
    for left in (5, 3, 1, 1):  # of seven blocks, two at a time
        pool, freed = pa.release_behind(pool, 1, max_new_tokens=8)
        assert freed.shape == (MAX_SEQS, 2)
        assert int((pool.block_tables[0, :7] >= 0).sum()) == left
    assert_same(pool, pa.release_behind(pool, 1)[0])


@pytest.mark.parametrize("bound", [-1, True, 2.5])
def test_a_bound_that_is_none_is_named(bound):
    with pytest.raises(pa.InvalidInputError, match="max_new_tokens"):
        pa.release_behind(grown(), 4, max_new_tokens=bound)


@pytest.mark.parametrize("window", [0, -3, True, 2.0, None, "4", np.float32(4)])
def test_a_window_that_is_none_is_named(window):
    with pytest.raises(pa.InvalidInputError, match="window"):
        pa.release_behind(grown(), window)


@pytest.mark.parametrize("window", [2**30, 2**31, 2**40, 2**70])
def test_a_window_wider_than_any_sequence_gives_nothing_back(window):
    pool, freed = pa.release_behind(grown(), window)
    assert_same(pool, grown())
    assert (freed == -1).all()


def test_a_traced_window_is_named():
    with pytest.raises(pa.InvalidInputError, match=r"window .*static_argnames"):
        jax.jit(pa.release_behind)(grown(), 4)

"""A step's batch: rows without room keep their place and do nothing, in all pools alike."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SPECS, asked_of, assert_same, attend_with_any_lse, may_refuse
from hypothesis import given

import pagedattn as pa
from pagedattn.testing import reference_attention

pytestmark = pytest.mark.usefixtures("exact_products")
HEAD_DIM, LENS = 16, (7, 8, 8, 5, 0)  # of sequences that own two blocks of 4 each, and of none
SIZES = {"num_tokens": 9, "max_query_len": 4}
ONE = {"num_tokens": 4, "max_query_len": 1}
STEPS = {  # new tokens of each sequence, the static sizes, and who needs no block
    "decode": ((1, 1, 0, 1, 0), ONE, [True, False, True, True, True]),
    "chunks": ((1, 3, 2, 3, 0), SIZES, [True, False, False, True, True]),
    "prompt": ((0, 0, 1, 3, 4), SIZES, [True, True, False, True, False]),
}
JITTED = functools.partial(jax.jit, static_argnames=("num_tokens", "max_query_len"))
NEXT, BATCHES = JITTED(pa.next_batch), JITTED(pa.next_batches)


def i32(*values):
    return jnp.array(values, jnp.int32)


def full_pool(num_blocks=8):
    pool = pa.init_block_pool(num_blocks, 4, max_seqs=5, max_blocks=3)
    return pa.append_tokens(pool, i32(*LENS))[0]


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize(
    ("option", "mode"),
    [("plain", "eager"), *((o, "jit") for o in ("plain", "sliding_window", "causal=False", "all"))],
)
@pytest.mark.parametrize("name", STEPS)
def test_rows_without_room_see_no_key(name, option, mode, backend):
    spec = SPECS[option]
    if any(may_refuse(backend, option) for option in asked_of(spec)):
        pytest.skip("refused")
    new, sizes, ok = STEPS[name]
    attend = functools.partial(attend_with_any_lse, spec=spec, backend=backend)
    begin, attend = (NEXT, jax.jit(attend)) if mode == "jit" else (pa.next_batch, attend)
    pool, batch, growth = begin(full_pool(), i32(*new), **sizes)
    assert growth.ok.tolist() == ok
    assert pool.seq_lens.tolist() == [n + m * o for n, m, o in zip(LENS, new, ok, strict=True)]
    query, key, value = normal(sizes["num_tokens"], 4, HEAD_DIM), *normal(2, 8, 4, 2, HEAD_DIM)
    out, lse = attend(query, pa.KVCache(key, value), batch)
    starts, lens = np.cumsum([0, *new]), np.where(ok, pool.seq_lens, 0)
    want, want_lse = reference_attention(
        *(np.asarray(x) for x in (query, key, value, pool.block_tables, lens, starts)), spec
    )
    np.testing.assert_allclose(out, want, atol=1e-4)
    idle = np.repeat([not o for o in ok], new)
    assert not np.asarray(out)[: len(idle)][idle].any()
    if lse is not None:
        np.testing.assert_allclose(lse, want_lse, atol=1e-4)
        assert (np.asarray(lse)[: len(idle)][idle] == -np.inf).all()
    assert (np.asarray(batch.slot_mapping)[: len(idle)] >= 0).tolist() == (~idle).tolist()


def test_a_shared_prefix_is_not_seen_by_who_has_no_room():
    pool, _ = pa.append_tokens(pa.init_block_pool(2, 4, max_seqs=2, max_blocks=3), i32(6, 0))
    pool, _ = pa.fork(pool, i32(0), i32(1))
    pool, batch, growth = pa.next_batch(pool, i32(1, 1), num_tokens=2, max_query_len=1)
    assert not growth.ok.any()
    cache = pa.KVCache(*normal(2, 2, 4, 1, HEAD_DIM))
    out, lse = pa.cascade_attention(normal(2, 2, HEAD_DIM), cache, *pa.split_prefix(batch))
    assert not out.any()
    assert (lse == -jnp.inf).all()


def test_sinks_alone_are_the_lse_of_rows_without_room():
    _, batch, _ = pa.next_batch(full_pool(), i32(0, 1, 0, 0, 0), num_tokens=1, max_query_len=1)
    cache, sinks = pa.KVCache(*normal(2, 8, 4, 2, HEAD_DIM)), jnp.array([0.5, -1])
    how = {"sinks": sinks, "return_lse": True, "backend": "xla"}
    out, lse = pa.paged_attention(normal(1, 2, HEAD_DIM), cache, batch, **how)
    assert not out.any()
    np.testing.assert_allclose(lse[0], sinks)


def test_a_scan_tries_again_until_there_is_room():
    """Two rows of 8 tokens and one free block: one goes on, then leaves, then so does the other."""
    pool = pa.init_block_pool(5, 4, max_seqs=2, max_blocks=3)
    pool, _ = pa.append_tokens(pool, i32(8, 8))

    def step(pool, _):
        pool, batch, growth = pa.next_batch(pool, i32(1, 1), num_tokens=2, max_query_len=1)
        ended = jnp.where(pool.seq_lens == 12, jnp.arange(2), -1)
        return pa.release(pool, ended)[0], (growth.ok, batch.slot_mapping)

    pool, (ok, slots) = jax.lax.scan(step, pool, length=8)
    assert ok.tolist() == [[True, False]] * 4 + [[True, True]] * 4
    assert ((slots >= 0) == ok).all()
    assert len(set(np.asarray(slots)[:, 1].tolist())) == 5  # -1, and four slots
    assert pool.seq_lens.tolist() == [4, 0]


LENGTHS = st.lists(st.integers(0, 6), min_size=4, max_size=4)
PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=3)


def some_pool(num_blocks, lens, pairs):
    """Sequences that have grown and forked, as far as there are blocks."""
    pool = pa.init_block_pool(num_blocks, 2, max_seqs=4, max_blocks=4)
    pool, _ = GROW(pool, i32(*lens))
    for parent, child in pairs:
        pool, _ = FORK(pool, i32(parent), i32(child))
    return pool


GROW, FORK = jax.jit(pa.append_tokens), jax.jit(pa.fork)


@given(
    num_blocks=st.lists(st.integers(5, 9), min_size=2, max_size=2),
    lens=LENGTHS,
    pairs=PAIRS,
    new=st.lists(st.sampled_from([0, 1, 1, 2, 3]), min_size=4, max_size=4),
    mode=st.sampled_from([BATCHES, BATCHES, pa.next_batches]),
)
def test_sequences_grow_in_all_pools_or_in_none(num_blocks, lens, pairs, new, mode):
    """Who could grow in each of them grows, though shared blocks fall to others then."""
    lens = some_pool(min(num_blocks), lens, []).seq_lens
    pools = [some_pool(n, lens.tolist(), pairs) for n in num_blocks]
    sizes = {"num_tokens": 12, "max_query_len": 3}
    grown, batches, growths = mode(pools, i32(*new), **sizes)
    ok = np.all([GROW(pool, i32(*new))[1].ok for pool in pools], axis=0)
    alone = [NEXT(pool, jnp.where(ok, i32(*new), 0), **sizes) for pool in pools]
    for index, (pool, _, growth) in enumerate(alone):
        assert growths[index].ok.tolist() == ok.tolist()
        assert_same(grown[index], pool)
        assert_same(growths[index].copy_src, growth.copy_src)
        slots = np.asarray(batches[index].slot_mapping)[: sum(new)]
        assert (slots >= 0).tolist() == np.repeat(ok, new).tolist()


@given(lens=LENGTHS, pairs=PAIRS, new=st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_one_pool_is_a_list_of_one(lens, pairs, new):
    pool, sizes = some_pool(9, lens, pairs), {"num_tokens": 12, "max_query_len": 3}
    listed = BATCHES([pool], i32(*new), **sizes)
    assert_same([x[0] for x in listed], list(NEXT(pool, i32(*new), **sizes)))


@pytest.mark.parametrize("mode", [NEXT, JITTED(pa.batch_from_pool)])
@pytest.mark.parametrize("new", [(1, 5, 1, 1, 0), (4, 4, 4, 1, 0), (1, -1, 1, 1, 0)])
def test_what_exceeds_the_static_sizes_ends_the_batch(mode, new):
    """Rows from the first misfit on: outside jit the same is an error."""
    misfit = new.index(5) if 5 in new else new.index(-1) if -1 in new else 2
    made = mode(full_pool(12), i32(*new), **SIZES)
    batch = made if isinstance(made, pa.BatchMetadata) else made[1]
    kept = [*new[:misfit], *[0] * (5 - misfit)]
    assert batch.query_lens.tolist() == kept
    assert (batch.slot_mapping >= 0).sum() == sum(kept)
    if not isinstance(made, pa.BatchMetadata):
        assert made[2].ok.tolist() == [True] * misfit + [n == 0 for n in new[misfit:]]
        assert made[0].seq_lens.tolist() == np.add(LENS, kept).tolist()
    for function in (pa.next_batch, pa.batch_from_pool):
        with pytest.raises(pa.InvalidInputError, match="query_lens"):
            function(full_pool(12), i32(*new), **SIZES)


def test_require_names_who_has_not_grown():
    _, _, growth = pa.next_batch(full_pool(), i32(1, 1, 0, 1, 0), **ONE)
    with pytest.raises(pa.OutOfBlocksError, match=r"sequences \[1\]"):
        growth.require()


def test_pools_that_are_none_are_named():
    other = pa.init_block_pool(4, 4, max_seqs=3, max_blocks=3)
    new = i32(1, 0, 0, 1, 0)
    for pools, words in [
        ([], "next_batch makes"),
        (full_pool(), "a list of BlockPools, got BlockPool"),
        ([full_pool(), None], r"pools\[1\] must be a BlockPool, got NoneType"),
        ([full_pool(), other], r"the same rows, got max_seqs of \[5, 3\]"),
    ]:
        with pytest.raises(pa.InvalidInputError, match=words):
            pa.next_batches(pools, new, **ONE)

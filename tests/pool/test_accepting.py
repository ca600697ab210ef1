"""Drafts that branch in a pool: one line is kept, the other tokens are taken back."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from test_pool import BLOCK_SIZE, CAPACITY, HEAD_DIM, MAX_SEQS, Side, both, i32, row_vector

import pagedattn as pa
from pagedattn.testing.visibility import lines

SIZES = {"num_tokens": 12, "max_query_len": 5}


def rows_of(tokens):
    """Keys and values of packed tokens, NaN behind them."""
    rows = np.full((2, SIZES["num_tokens"], 1, HEAD_DIM), np.nan, np.float32)
    for index, token in enumerate(tokens):
        rows[:, index] = row_vector(token)
    return jnp.asarray(rows)


class TreeMachine(RuleBasedStateMachine):
    """Steps of drafts on forked, held and released sequences, against lists of tokens."""

    @initialize()
    def start(self):
        self.side, self.next_token = Side(8), 0

    @rule(
        counts=st.tuples(*[st.sampled_from([0, 1, 3, 5])] * MAX_SEQS),
        seed=st.integers(0, 10**6),
    )
    def draft(self, counts, seed):
        side, rng = self.side, np.random.default_rng(seed)
        counts = [n if sum(counts[: i + 1]) <= 12 else 0 for i, n in enumerate(counts)]
        parents = [rng.integers(-1, np.maximum(np.arange(n), 0)) for n in counts]
        padded = i32(*np.append(np.concatenate(parents), np.full(12 - sum(counts), -1)).astype(int))
        expected = side.grows(counts)
        next_batch = functools.partial(pa.next_batch, **SIZES)
        side.pool, batch, growth = next_batch(side.pool, i32(*counts), parents=padded)
        assert growth.ok.tolist() == expected
        side.cache = pa.copy_blocks(side.cache, growth.copy_src, growth.copy_dst)
        new = range(self.next_token, self.next_token + sum(counts))
        side.cache = pa.write_kv(side.cache, *rows_of(new), batch.slot_mapping)
        path = np.full((MAX_SEQS, 5), -1)
        starts = np.append(0, np.cumsum(counts))
        for row, family in enumerate(parents):
            choices = [[], *(line[::-1] for line in lines(len(family), family))]
            line = choices[rng.integers(len(choices))]
            path[row, : len(line)] = line
            if expected[row]:
                side.rows[row] += [new[starts[row] + index] for index in line]
        side.pool, side.cache, done = both(
            pa.accept_tokens, side.pool, side.cache, i32(*path.ravel()).reshape(path.shape), batch
        )
        assert done.tolist() == [ok and n > 0 for ok, n in zip(expected, counts, strict=True)]
        self.next_token += sum(counts)

    @rule(parent=st.integers(0, MAX_SEQS - 1), child=st.integers(0, MAX_SEQS - 1))
    def fork(self, parent, child):
        side = self.side
        side.pool, made = pa.fork(side.pool, i32(parent), i32(child))
        if made[0]:
            side.rows[child] = list(side.rows[parent])

    @rule(row=st.integers(0, MAX_SEQS - 1))
    def release(self, row):
        side = self.side
        side.pool, freed = pa.release(side.pool, i32(row))
        side.cache = pa.fill_blocks(side.cache, freed, value=jnp.nan)
        side.rows[row] = []

    @rule(window=st.sampled_from([1, 3]))
    def release_behind(self, window):
        side = self.side
        side.pool, freed = pa.release_behind(side.pool, window)
        side.cache = pa.fill_blocks(side.cache, freed, value=jnp.nan)
        side.forget(window, None)

    @rule(row=st.integers(0, MAX_SEQS - 1))
    def hold(self, row):
        side = self.side
        blocks = (side.table(row) + [-1] * CAPACITY)[: CAPACITY // BLOCK_SIZE]
        side.pool = pa.hold_blocks(side.pool, i32(*blocks))
        side.held += side.blocks(row)

    @invariant()
    def pool_and_contents_are_right(self):
        if hasattr(self, "side"):
            self.side.check()


TreeMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)
TestTrees = TreeMachine.TestCase


def step(num_blocks=4, counts=(5, 0)):
    """A pool, a cache with the tokens' numbers, and the batch of a step of drafts."""
    pool = pa.init_block_pool(num_blocks, 2, max_seqs=2, max_blocks=4)
    parents = i32(-1, 0, 0, 2, 2)
    pool, batch, _ = pa.next_batch(
        pool, i32(*counts), num_tokens=5, max_query_len=5, parents=parents
    )
    numbers = jnp.arange(5.0)[:, None, None]
    cache = pa.init_kv_cache(num_blocks, 2, 1, 1, jnp.float32)
    return pool, pa.write_kv(cache, numbers, numbers, batch.slot_mapping), batch


def test_the_caches_of_all_layers_move():
    pool, cache, batch = step()
    pool, caches, done = pa.accept_tokens(
        pool, {"first": cache, "last": cache}, jnp.array([[0, 2, 4], [-1, -1, -1]]), batch
    )
    assert done.tolist() == [True, False]
    slots = pool.block_tables[0, :2, None] * 2 + jnp.arange(2)
    for moved in caches.values():
        assert moved.key.ravel()[slots.ravel()[:3]].tolist() == [0, 2, 4]
    assert (pool.seq_lens.tolist(), int(pool.num_free)) == ([3, 0], 2)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_scales_of_tokens_move_with_them(dtype):
    pool, _, batch = step()
    rows = jax.random.normal(jax.random.key(0), (2, 5, 1, 32)) * jnp.arange(1.0, 6)[:, None, None]
    cache = pa.init_kv_cache(4, 2, 1, 32, dtype, scales="token")
    cache = pa.write_kv(cache, *rows, batch.slot_mapping)
    path = jnp.array([[0, 2, 4], [-1, -1, -1]])
    _, moved, _ = pa.accept_tokens(pool, cache, path, batch)
    assert {"key_scale", "value_scale"} < cache.by_slot.keys()
    for name, array in cache.by_slot.items():
        before, after = (each.reshape(8, -1) for each in (array, moved.by_slot[name]))
        own = batch.slot_mapping
        np.testing.assert_array_equal(after[own[:3]], before[own[path[0]]])


def test_a_draft_that_is_shared_since_stays_as_it_is():
    pool, cache, batch = step()
    pool, _ = pa.fork(pool, i32(0), i32(1))
    after, moved, done = pa.accept_tokens(pool, cache, jnp.array([[0, 2], [-1, -1]]), batch)
    assert done.tolist() == [False, False]
    assert after.seq_lens.tolist() == [5, 5]
    np.testing.assert_array_equal(moved.key, cache.key)


def test_a_second_time_nothing_happens():
    pool, cache, batch = step()
    path = jnp.array([[0, 2], [-1, -1]])
    pool, cache, _ = pa.accept_tokens(pool, cache, path, batch)
    again, same, done = pa.accept_tokens(pool, cache, path, batch)
    assert not done.any()
    assert again.seq_lens.tolist() == pool.seq_lens.tolist() == [2, 0]
    np.testing.assert_array_equal(same.key, cache.key)


@pytest.mark.optimised
def test_in_place_under_donation():
    pool, cache, batch = step()
    where = [plane.unsafe_buffer_pointer() for plane in cache.planes]
    accept = jax.jit(pa.accept_tokens, donate_argnums=(0, 1))
    _, cache, _ = accept(pool, cache, jnp.array([[0, 2], [-1, -1]]), batch)
    assert [plane.unsafe_buffer_pointer() for plane in cache.planes] == where


@pytest.mark.parametrize("path", [[1, 1], [2, 0], [5, -1], [-3, -1]])
def test_a_path_that_does_not_rise_is_refused(path):
    pool, cache, batch = step()
    with pytest.raises(pa.InvalidInputError, match="rising indices of a sequence's new tokens"):
        pa.accept_tokens(pool, cache, jnp.array([path, [-1, -1]]), batch)
    jitted = jax.jit(pa.accept_tokens)
    pool, _, _ = jitted(pool, cache, jnp.array([path, [-1, -1]]), batch)
    assert pool.seq_lens.tolist() == [int(path[0] in (1, 2)), 0]

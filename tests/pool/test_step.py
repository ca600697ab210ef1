"""The pages' own steps against dense attention: forks, too few blocks, preemption, windows.

What a sequence gets has to follow from its own tokens alone. A step that has no room for a sequence
leaves its row and its cached bytes as they were, and gives out 0.
"""

import ast
import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import pagedattn as pa
from pagedattn._arrays.namespace import cdiv

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
MAX_SEQS, MAX_BLOCKS, BLOCK_SIZE, HEAD_DIM, LONGEST, WINDOW = 4, 5, 2, 4, 3, 3
CAPACITY = MAX_BLOCKS * BLOCK_SIZE
SPECS = [pa.AttentionSpec(sliding_window=WINDOW), pa.AttentionSpec()]
ROWS = st.integers(0, MAX_SEQS - 1)
COUNTS = st.tuples(*[st.sampled_from([0, 1, 1, 1, 2, LONGEST])] * MAX_SEQS)


def of_page(page, function):
    """A function that a page defines: alone, with what the page imports."""
    names = {"pa": pa, "jax": jax, "jnp": jnp, "partial": functools.partial}
    names |= {"specs": SPECS, "WINDOW": WINDOW}
    tree = ast.parse("\n".join(CODE.findall((ROOT / page).read_text())))
    body = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == function]
    exec(compile(ast.Module([*body], []), page, "exec"), names)
    return names[function]


@functools.cache
def vectors(token):
    """A token's query, key and value: of two heads, and of one."""
    rows = np.random.default_rng(token).standard_normal((4, HEAD_DIM), np.float32)
    return rows[:2], rows[2:3], rows[3:]


def dense(history, window):
    """Attention of the last token of a history to what it sees of it, in float64."""
    query, *_ = vectors(history[-1])
    seen = history if window is None else history[-window:]
    key, value = (np.concatenate([vectors(token)[i] for token in seen]) for i in (1, 2))
    weights = np.exp(query.astype(np.float64) @ key.T * HEAD_DIM**-0.5)
    return weights @ value / weights.sum(axis=1, keepdims=True)


jitted = functools.cache(jax.jit)


def one_of(rows, index):
    return rows[index % len(rows)]


def i32(*values):
    return jnp.array(values, jnp.int32)


class Place:
    """Pools of the same rows and their caches, on the device or on the host."""

    def __init__(self, sizes):
        rows = {"max_seqs": MAX_SEQS, "max_blocks": MAX_BLOCKS}
        self.pools = [pa.init_block_pool(size, BLOCK_SIZE, **rows) for size in sizes]
        planes = [jnp.full((size, BLOCK_SIZE, 1, HEAD_DIM), jnp.nan) for size in sizes]
        self.caches = [pa.KVCache(plane, plane.copy()) for plane in planes]
        self.histories = [[] for _ in range(MAX_SEQS)]  # tokens that are or shall be cached

    def cached(self, row):
        return int(self.pools[0].seq_lens[row])

    def used(self):
        """Rows with cached tokens."""
        return np.flatnonzero(self.pools[0].seq_lens).tolist()

    def unused(self):
        """Rows that no sequence has: a preempted one keeps its own."""
        return [row for row, history in enumerate(self.histories) if not history]

    def kept(self, row):
        """A row, and what the cache holds of its tokens, in each pool."""
        found = []
        for pool, cache in zip(self.pools, self.caches, strict=True):
            length = int(pool.seq_lens[row])
            table = np.array(pool.block_tables[row, : cdiv(length, BLOCK_SIZE)])
            slots = (table[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel()[:length]
            planes = [np.array(plane).reshape(-1, HEAD_DIM)[slots] for plane in cache.planes]
            found.append([length, table, [plane[slots >= 0] for plane in planes]])
        return found


class Steps(RuleBasedStateMachine):
    """A subclass says which step, in how many pools, of which windows."""

    sizes, windows = (8,), (None,)

    def advance(self, rows, new, longest):
        """Takes the step; the output of each pool's layer, and who has grown."""
        raise NotImplementedError

    @initialize()
    def start(self):
        self.device, self.host = Place(self.sizes), Place([6] * len(self.sizes))
        self.next_token = 0

    def brings(self, row, count):
        """Tokens that are not cached yet, as after a preemption, or else new ones."""
        pending = self.device.histories[row][self.device.cached(row) :]
        if pending or not count:
            return pending[:count]
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    @rule(counts=COUNTS)
    def step(self, counts):
        self.take(counts)

    @rule(counts=st.tuples(*[st.integers(0, 1)] * MAX_SEQS))
    def decode(self, counts):
        self.take(counts)

    def take(self, counts):
        tokens = [self.brings(row, count) for row, count in enumerate(counts)]
        new, before = list(map(len, tokens)), [self.device.kept(row) for row in range(MAX_SEQS)]
        longest = LONGEST if max(new) > 1 else 1
        rows = [np.full((MAX_SEQS * longest, heads, HEAD_DIM), np.nan) for heads in (2, 1, 1)]
        for index, token in enumerate(itertools.chain(*tokens)):
            for array, vector in zip(rows, vectors(token), strict=True):
                array[index] = vector
        room = self.has_room(new)
        outs, ok = self.advance(map(jnp.float32, rows), i32(*new), longest)
        assert ok.all() or not room
        starts = np.cumsum([0, *new])
        for row, grown in enumerate(ok.tolist()):
            got = [np.asarray(out[starts[row] : starts[row + 1]]) for out in outs]
            self.check(row, tokens[row], grown, before[row], got)

    def has_room(self, new):
        """Whether there are blocks for all, even if each had to copy one."""
        lens = np.array([self.device.cached(row) for row in range(MAX_SEQS)])
        total = lens + new
        need = cdiv(total, BLOCK_SIZE) - cdiv(lens, BLOCK_SIZE) + (np.array(new) > 0)
        free = min(int(pool.num_free) for pool in self.device.pools)
        return need.sum() <= free and (total <= CAPACITY).all()

    def check(self, row, tokens, grown, before, got):
        device, length = self.device, before[0][0]
        history = device.histories[row][:length] + tokens
        if len(history) > len(device.histories[row]) and len(history) <= CAPACITY:
            device.histories[row] = history
        if not grown:
            assert not any(out.any() for out in got)
            jax.tree.map(np.testing.assert_array_equal, device.kept(row), before)
            return
        assert all(now[0] == length + len(tokens) for now in device.kept(row))
        for out, window in zip(got, self.windows, strict=True):
            for index, ours in enumerate(out, start=length + 1):
                np.testing.assert_allclose(ours, dense(history[:index], window), atol=1e-5)

    @precondition(lambda self: self.device.used() and self.device.unused())
    @rule(index=ROWS)
    def fork(self, index):
        device = self.device
        parent, child = one_of(device.used(), index), one_of(device.unused(), index)
        pairs = i32(parent), i32(child)
        device.pools = [jitted(pa.fork)(pool, *pairs)[0] for pool in device.pools]
        device.histories[child] = device.histories[parent][: device.cached(parent)]

    @precondition(lambda self: self.device.used())
    @rule(index=ROWS, ends=st.booleans())
    def release(self, index, ends):
        """A sequence ends, or is preempted: its tokens come again."""
        device, row = self.device, one_of(self.device.used(), index)
        freed = [jitted(pa.release)(pool, i32(row)) for pool in device.pools]
        device.pools = [pool for pool, _ in freed]
        device.caches = [
            jitted(pa.fill_blocks)(cache, blocks, jnp.nan)
            for cache, (_, blocks) in zip(device.caches, freed, strict=True)
        ]
        if ends:
            device.histories[row] = []

    @precondition(lambda self: self.device.used() and self.host.unused())
    @rule(index=ROWS)
    def swap_out(self, index):
        self.swap(pa.swap_out, self.device, self.host, index)

    @precondition(lambda self: self.host.used() and self.device.unused())
    @rule(index=ROWS)
    def swap_in(self, index):
        self.swap(pa.swap_in, self.host, self.device, index)

    def swap(self, function, source, target, index):
        """Moves a sequence in all pools or in none."""
        row, other = one_of(source.used(), index), one_of(target.unused(), index)
        pairs = zip(self.device.pools, self.host.pools, strict=True)
        swaps = [jitted(function)(*pools, i32(row), i32(other)) for pools in pairs]
        if not all(swap.ok[0] for *_, swap in swaps):
            return
        self.device.pools, self.host.pools, moved = map(list, zip(*swaps, strict=True))
        target.caches = [
            jitted(pa.swap_blocks)(*caches, swap.src, swap.dst)
            for *caches, swap in zip(source.caches, target.caches, moved, strict=True)
        ]
        target.histories[other], source.histories[row] = source.histories[row], []


class OneStep(Steps):
    function: Callable[..., Any]

    def advance(self, rows, new, longest):
        device = self.device
        pool, cache, out, growth = self.function(
            device.pools[0], device.caches[0], *rows, new, longest
        )
        device.pools, device.caches = [pool], [cache]
        return [out], growth.ok


class FirstPageSteps(OneStep):
    function = staticmethod(of_page("docs/index.md", "step"))


class ServingSteps(OneStep):
    function = staticmethod(of_page("docs/serving.md", "step"))


class WindowSteps(Steps):
    """A window's pool that may lack what the other has, and the other way round."""

    sizes, windows = (6, 9), (WINDOW, None)
    function = staticmethod(
        jax.jit(of_page("docs/serving.md", "layers"), static_argnames="max_query_len")
    )

    def advance(self, rows, new, longest):
        device = self.device
        device.pools, device.caches, outs, growth = self.function(
            device.pools, device.caches, *rows, new, longest
        )
        return outs, growth.ok


PROFILE = settings(max_examples=40, stateful_step_count=25, deadline=None)
for machine in (FirstPageSteps, ServingSteps, WindowSteps):
    machine.TestCase.settings = PROFILE
TestFirstPageSteps = FirstPageSteps.TestCase
TestServingSteps = ServingSteps.TestCase
TestWindowSteps = WindowSteps.TestCase


@pytest.mark.parametrize("page", ["docs/index.md", "docs/serving.md"])
def test_a_step_updates_pool_and_cache_in_place(page):
    place, step = Place([8]), of_page(page, "step")
    state = place.pools[0], place.caches[0]
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    rows = [jnp.ones((4, heads, HEAD_DIM)) for heads in (2, 1, 1)]
    for new in ((1, 0, 1, 0), (1, 1, 1, 1)):
        *state, _, growth = step(*state, *rows, i32(*new), 1)
        growth.require()
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)] == pointers

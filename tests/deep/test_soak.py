"""Threads that call every backend by several programs for PAGEDATTN_SOAK seconds: 600 unless told.

Every result is the first one's, and nothing grows: memory, open handles, live arrays, traces.
"""

import functools
import gc
import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import mixed
from pagedattn_interop import to_torch, torch_call

import pagedattn as pa
import pagedattn_torch as pt
from pagedattn._dispatch.registry import can_load
from pagedattn.testing import batch_of, cache_of

SECONDS = float(os.environ.get("PAGEDATTN_SOAK", "600"))
THREADS = 4
GROWTH = 48 * 2**20  # what allocators and caches of a runtime may keep

traces = itertools.count()  # taken by one at each trace


@functools.cache
def arguments():
    problem = mixed()
    return jnp.asarray(problem.query), cache_of(problem), batch_of(problem)


@functools.partial(jax.jit, static_argnames="backend", donate_argnames="cache")
def step(query, cache, batch, backend):
    next(traces)
    cache = pa.write_kv(cache, query[:, :2], query[:, :2], batch.slot_mapping)
    return cache, pa.paged_attention(query, cache, batch, backend=backend)


def jitted_step(backend):
    query, cache, batch = arguments()
    return step(query, jax.tree.map(jnp.copy, cache), batch, backend)[1]


def eager_call(backend):
    return pa.paged_attention(*arguments(), backend=backend)


@functools.partial(jax.jit, static_argnames="backend")
@jax.grad
def slope(query, cache, batch, backend):
    next(traces)
    return (pa.paged_attention(query, cache, batch, backend=backend)[:18] ** 2).sum()


def gradient(backend):
    return slope(*arguments(), backend=backend)


@jax.jit
def grow(pool, counts):
    next(traces)
    pool, growth = pa.append_tokens(pool, counts)
    pool, _ = pa.fork(pool, jnp.array([0]), jnp.array([2]))
    pool, _ = pa.release(pool, jnp.array([1]))
    return pool, growth.ok


def pool(_):
    empty = pa.init_block_pool(16, 4, max_seqs=3, max_blocks=5)
    grown, _ = grow(empty, jnp.array([5, 7, 0]))
    return grow(grown, jnp.array([3, 1, 2]))[0].block_tables


def torch_function(_):
    query, cache, batch = to_torch(arguments()[:2], copy=True) + arguments()[2:]
    return np.asarray(pt.paged_attention(query, cache, batch, backend="sdpa"))


def layer(_):
    meta = pt.TorchSDPAMetadata.from_lists([3, 1], [0, 4], [[0], [1, 2]], block_size=4)
    rows = torch.linspace(-1, 1, 64).reshape(4, 16)
    call = pt.TorchSDPABackendImpl(num_heads=2, head_size=8)
    return np.asarray(call.forward(rows, rows, rows, torch.zeros(2, 3, 4, 2, 8), meta))


def bridge(_):
    double = torch_call(torch.mul, jax.ShapeDtypeStruct((8,), jnp.float32))
    return double(jnp.arange(8.0), jnp.full(8, 2.0))


def refused(backend):
    query, cache, batch = arguments()
    with pytest.raises(pa.InvalidInputError):
        pa.paged_attention(query[:, :3], cache, batch, backend=backend)
    return 0


BACKENDS = [name for name in ("xla", "sdpa") if can_load(name)]
PROGRAMS = [
    *itertools.product((jitted_step, eager_call, gradient, refused), BACKENDS),
    *itertools.product((pool, torch_function, layer, bridge), [None]),
]


def figures():
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "handles": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "arrays": len(jax.live_arrays()),
        "traces": traces.__reduce__()[1][0],
    }


def work(seed, until, expected):
    """Calls programs in an order of its own; returns how many."""
    rng, calls = np.random.default_rng(seed), 0
    while time.monotonic() < until:
        calls += 1
        program, backend = PROGRAMS[int(rng.integers(len(PROGRAMS)))]
        got = np.asarray(program(backend))
        np.testing.assert_allclose(got, expected[program, backend], rtol=1e-5, atol=1e-6)
    return calls


def run_threads(seconds, expected):
    until = time.monotonic() + seconds
    with ThreadPoolExecutor(THREADS) as threads:
        calls = [threads.submit(work, seed, until, expected) for seed in range(THREADS)]
        return sum(call.result() for call in calls)


def test_nothing_grows():
    expected = {pair: np.asarray(pair[0](pair[1])) for pair in PROGRAMS}
    run_threads(min(SECONDS, 60), expected)  # what is made once is made by then
    before = figures()
    calls = run_threads(SECONDS, expected)
    after = figures()
    print(f"{calls} calls in {SECONDS:.0f} s: {before} -> {after}")
    assert calls > SECONDS
    assert after["memory"] < before["memory"] + GROWTH
    for name in ("handles", "threads", "arrays", "traces"):
        assert after[name] <= before[name], (name, before, after)

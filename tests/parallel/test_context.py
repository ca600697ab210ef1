"""Context parallel, as examples/context_parallel.py does it: the oracle over the whole sequence."""

from functools import partial

import context_parallel as example
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from context import attention as context_attention
from context import blocks as context_blocks
from context import windows as context_windows
from hypothesis import given
from hypothesis import strategies as st
from some_devices import mesh_over

from pagedattn import AttentionSpec, BatchMetadata, init_block_pool, init_kv_cache
from pagedattn.testing import assert_attention_close, random_problem

SEQ_LENS = [30, 3, 61, 0, 12]
MIXED, DECODE = [7, 1, 16, 0, 1], [1, 1, 1, 0, 1]
LONGEST, TOKENS = 16, 40  # of a step: few programs
PLAIN = AttentionSpec()
SLOPES = (0.25, -0.5, 0.75, -1.0)
ALL = AttentionSpec(scale=0.4, logits_soft_cap=2.0, sliding_window=21, alibi_slopes=SLOPES)
CASES = {
    "a mix on 2": (2, MIXED, PLAIN, {}),
    "a mix on 4": (4, MIXED, AttentionSpec(scale=0.4, logits_soft_cap=2.0), {}),
    "decodes on 4": (4, DECODE, AttentionSpec(causal=False), {}),
    "halves on 4": (4, MIXED, PLAIN, {"dtype": ml_dtypes.bfloat16}),
    "a window on 4": (4, MIXED, AttentionSpec(sliding_window=9), {}),
    "both ways on 4": (4, MIXED, AttentionSpec(causal=False, sliding_window=12), {}),
    "ALiBi on 2": (2, MIXED, AttentionSpec(alibi_slopes=SLOPES), {}),
    "sinks on 4": (4, DECODE, PLAIN, {"arrays": ["sinks"]}),
    "all in eight bits on 2": (2, MIXED, ALL, {"arrays": ["sinks"], "cache_dtype": np.int8}),
}


def problem_of(query_lens=MIXED, spec=PLAIN, **options):
    return random_problem(query_lens, SEQ_LENS, spec, **options, poison=None)


def mesh_of(num_devices):
    return mesh_over(num_devices, example.AXIS)


def start(problem, num_devices, num_blocks=20):
    def make():
        sizes = num_blocks, problem.block_size
        pool = init_block_pool(*sizes, max_seqs=len(problem.seq_lens), max_blocks=16)
        cache = init_kv_cache(
            *(*sizes, *problem.key_cache.shape[2:], problem.key_cache.dtype),
            key_scale=problem.key_scale,
            value_scale=problem.value_scale,
        )
        return pool, cache.with_planes(*map(unwritten, cache.planes))

    return example.start(mesh_of(num_devices), make)


def unwritten(plane):
    """What nobody has written there; int8 has no NaN."""
    return jnp.full_like(plane, -128 if plane.dtype == jnp.int8 else jnp.nan)


def keys_of(problem, begins, ends):
    """Packed keys and values of the tokens from `begins` to `ends` of each sequence."""
    size, spans = problem.block_size, zip(problem.block_tables, begins, ends, strict=True)
    at = [(row[j // size], j % size) for row, a, b in spans for j in range(a, b)]
    blocks, offsets = np.array(at, int).reshape(-1, 2).T
    held = problem.key_cache[blocks, offsets], problem.value_cache[blocks, offsets]
    scales = problem.key_scale, problem.value_scale
    if problem.key_scale is None:
        return held
    return tuple(np.float32(x) * s.reshape(-1, 1) for x, s in zip(held, scales, strict=True))


def step(problem, state, num_devices, begins, ends, query=None, tokens=TOKENS, longest=LONGEST):
    """A step with the tokens from `begins` to `ends`, padded with NaN."""
    key, value = keys_of(problem, begins, ends)
    shape = len(key), *problem.query.shape[1:]
    query = np.ones(shape, problem.query.dtype) if query is None else query
    padding = [(0, tokens - len(key)), (0, 0), (0, 0)]
    padded = (np.pad(x, padding, constant_values=np.nan) for x in (query, key, value))
    heads, new = tuple(map(jnp.asarray, padded)), jnp.asarray(np.subtract(ends, begins))
    mesh = mesh_of(num_devices)
    sinks = problem.sinks
    state, out, ok = example.step(mesh, state, heads, new, longest, problem.spec, sinks)
    assert not np.asarray(out[len(key) :]).any()
    return state, np.asarray(out[: len(key)]), ok


def with_context(problem, num_devices):
    """The state in which a problem's queries are new: all before them came in chunks."""
    state, context = start(problem, num_devices), np.array(problem.context_lens)
    begins = np.zeros_like(context)
    while (begins < context).any():
        ends = np.minimum(np.add(begins, [11, 3, 16, 0, 5]), context)
        state, _, ok = step(problem, state, num_devices, begins, ends)
        assert ok.all()
        begins = ends
    return state


@pytest.mark.parametrize("name", CASES)
def test_decodes_and_chunks_match_the_oracle(name):
    num_devices, query_lens, spec, options = CASES[name]
    problem = problem_of(query_lens, spec, **options)
    state = with_context(problem, num_devices)
    sizes = {"tokens": 4, "longest": 1} if query_lens == DECODE else {}
    ends = problem.seq_lens
    (pool, cache), out, ok = step(
        problem, state, num_devices, problem.context_lens, ends, problem.query, **sizes
    )
    assert ok.all()
    assert_attention_close(out, None, problem)
    assert_spread(pool, cache)


def assert_spread(pool, cache):
    """Every token lies on one device, and they have about as many."""
    lens = np.asarray(pool.seq_lens)
    np.testing.assert_array_equal(lens.sum(0), SEQ_LENS)
    assert (lens.max(0) - lens.min(0) <= pool.block_size).all()
    key = np.asarray(cache.key)
    written = (key != np.asarray(unwritten(cache.key))).any(axis=(3, 4))
    if key.dtype != np.int8:
        written = ~np.isnan(np.float32(key)).any(axis=(3, 4))
    np.testing.assert_array_equal(written.sum(axis=(1, 2)), lens.sum(1))


def test_without_blocks_on_one_device_a_sequence_grows_on_none():
    """Of two blocks on each device the first sequence takes one of the first device."""
    state = start(problem_of(), 4, num_blocks=2)

    def on_each(pool, new):
        pool = jax.tree.map(lambda leaf: leaf[0], pool)
        pool, _, ok = context_blocks.grow(pool, new, num_tokens=64, max_query_len=32)
        return jax.tree.map(lambda leaf: leaf[None], pool), ok

    specs = {"in_specs": (example.SPREAD, example.EVERYWHERE), "mesh": mesh_of(4)}
    outs = example.SPREAD, example.EVERYWHERE
    grow = jax.jit(jax.shard_map(on_each, **specs, out_specs=outs))
    pool, ok = grow(state[0], jnp.array([4, 29, 1, 0, 0]))
    assert ok.tolist() == [True, False, False, True, True]  # who waits holds up those after it
    np.testing.assert_array_equal(pool.seq_lens[:, 0], [4, 0, 0, 0])
    assert not pool.seq_lens[:, 1:].any()
    assert pool.num_free.tolist() == [1, 2, 2, 2]
    pool, ok = grow(pool, jnp.array([0, 16, 1, 0, 0]))
    assert ok.all()


@pytest.mark.parametrize("window", [None, 9])
def test_tokens_without_blocks_keep_their_place_and_get_nothing(window):
    """Of three blocks on each device, against twenty."""
    problem = problem_of(spec=AttentionSpec(sliding_window=window))
    begins, ends = np.array([5, 2, 14, 0, 3]), np.array([21, 3, 30, 0, 4])
    query = np.random.default_rng(0).standard_normal((34, *problem.query.shape[1:]), np.float32)
    outs = []
    for num_blocks in (3, 20):
        state = start(problem, 4, num_blocks)
        state, _, ok = step(problem, state, 4, [0] * 5, begins)
        assert ok.all()
        before = np.array(state[1].key)
        state, out, ok = step(problem, state, 4, begins, ends, query)
        outs.append((out, np.repeat(ok, ends - begins)))
        lens = np.where(ok, ends, begins)
        np.testing.assert_array_equal(np.asarray(state[0].seq_lens).sum(0), lens)
        written = ~np.isnan(np.asarray(state[1].key)).any(axis=(3, 4))
        assert written.sum() == lens.sum()
        np.testing.assert_array_equal(np.where(np.isnan(before), before, state[1].key), before)
    (out, grown), (want, _) = outs
    assert grown.tolist() == [False] * 16 + [True] + [False] * 16 + [True]
    assert not out[~grown].any()
    np.testing.assert_allclose(out[grown], want[grown], atol=1e-5)


@partial(jax.jit, static_argnums=1)
def shown_on_four(context_lens, window):
    """To two tokens more of three sequences: the slots that each device reads, how many, positions.

    An axis of `jax.vmap` stands for the devices, and column c of each row for block 2c.
    """

    def on_each():
        seqs = jnp.repeat(jnp.arange(3), 2)
        batch = BatchMetadata(
            block_tables=jnp.tile(2 * jnp.arange(16), (3, 1)),
            seq_lens=context_blocks.length_here(context_lens, jnp.arange(3), 4),
            query_start_loc=jnp.arange(0, 8, 2),
            slot_mapping=jnp.full(7, -1),
            positions=jnp.append(context_lens[seqs] + jnp.tile(jnp.arange(2), 3), 0),
            block_size=4,
            max_query_len=2,
        )
        tokens, shown = context_windows.in_window(batch, window)
        at = context_blocks.positions_of(tokens, jnp.append(seqs, -1), 4)
        return shown.block_tables, shown.seq_lens, at

    return jax.vmap(on_each, axis_name=example.AXIS, axis_size=4)()


@pytest.mark.parametrize("window", [1, 2, 5, 16, 40])
@given(context_lens=st.lists(st.integers(0, 60), min_size=3, max_size=3))
def test_a_window_shows_each_of_its_keys_on_one_device_and_no_others(window, context_lens):
    slots, lens, positions = map(np.asarray, shown_on_four(np.int32(context_lens), window))
    assert slots.shape[2] <= (window - 1) / 4 + 8
    read = np.arange(slots.shape[2]) < lens[..., None]
    for token, context_len in enumerate(np.repeat(context_lens, 2)):
        oldest = max(0, context_len + token % 2 - window + 1)
        keys = positions[:, token][read[:, token]]
        assert sorted(keys) == list(range(oldest, context_len))
    held = positions // 16 * 8 + positions % 4  # each device has the fourth part, by its columns
    np.testing.assert_array_equal(np.where(read, held - slots, 0), 0)
    assert not lens[:, -1].any()  # of padding


def test_a_window_needs_no_bias(monkeypatch):
    """Which the fast kernels refuse."""
    given, attention = [], context_attention.paged_attention

    def recorded(*arrays, **options):
        given.append(options.get("bias"))
        return attention(*arrays, **options)

    monkeypatch.setattr(context_attention, "paged_attention", recorded)
    problem = problem_of(DECODE, AttentionSpec(sliding_window=11))
    state = start(problem, 1)
    step(problem, state, 1, [0] * 5, DECODE, tokens=4, longest=1)
    assert given == [None, None]  # of the context, and of what is new

"""Context parallel, as examples/context_parallel.py does it: the oracle over the whole sequence."""

from functools import partial

import context_parallel as example
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh

from pagedattn import AttentionSpec, UnsupportedError, init_block_pool, init_kv_cache
from pagedattn.testing import assert_attention_close, random_problem

SEQ_LENS = [30, 3, 61, 0, 12]
MIXED, DECODE = [7, 1, 16, 0, 1], [1, 1, 1, 0, 1]
LONGEST, TOKENS = 16, 40  # of a step: few programs
PLAIN = AttentionSpec()
CASES = {
    "a mix on 2": (2, MIXED, PLAIN, np.float32),
    "a mix on 4": (4, MIXED, AttentionSpec(scale=0.4, logits_soft_cap=2.0), np.float32),
    "decodes on 4": (4, DECODE, AttentionSpec(causal=False), np.float32),
    "halves on 4": (4, MIXED, PLAIN, ml_dtypes.bfloat16),
}
several = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")


def problem_of(query_lens=MIXED, spec=PLAIN, dtype=np.float32):
    return random_problem(query_lens, SEQ_LENS, spec, dtype=dtype, poison=None)


def mesh_of(num_devices):
    return Mesh(np.array(jax.devices()[:num_devices]), example.AXIS)


def start(problem, num_devices, num_blocks=20):
    def make():
        sizes = num_blocks, problem.block_size
        pool = init_block_pool(*sizes, max_seqs=len(problem.seq_lens), max_blocks=16)
        cache = init_kv_cache(*sizes, *problem.key_cache.shape[2:], problem.query.dtype)
        return pool, jax.tree.map(lambda plane: plane + jnp.nan, cache)  # what nobody wrote

    return example.start(mesh_of(num_devices), make)


def keys_of(problem, begins, ends):
    """Packed keys and values of the tokens from `begins` to `ends` of each sequence."""
    size, spans = problem.block_size, zip(problem.block_tables, begins, ends, strict=True)
    at = [(row[j // size], j % size) for row, a, b in spans for j in range(a, b)]
    blocks, offsets = np.array(at, int).reshape(-1, 2).T
    return problem.key_cache[blocks, offsets], problem.value_cache[blocks, offsets]


def step(problem, state, num_devices, begins, ends, query=None, tokens=TOKENS, longest=LONGEST):
    """A step with the tokens from `begins` to `ends`, padded with NaN."""
    key, value = keys_of(problem, begins, ends)
    shape = len(key), *problem.query.shape[1:]
    query = np.ones(shape, problem.query.dtype) if query is None else query
    padding = [(0, tokens - len(key)), (0, 0), (0, 0)]
    padded = (np.pad(x, padding, constant_values=np.nan) for x in (query, key, value))
    heads, new = tuple(map(jnp.asarray, padded)), jnp.asarray(np.subtract(ends, begins))
    mesh = mesh_of(num_devices)
    state, out, ok = example.step(mesh, state, heads, new, longest, problem.spec)
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


@several
@pytest.mark.parametrize("name", CASES)
def test_decodes_and_chunks_match_the_oracle(name):
    num_devices, query_lens, spec, dtype = CASES[name]
    problem = problem_of(query_lens, spec, dtype)
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
    written = ~np.isnan(np.asarray(cache.key, np.float32)).any(axis=(3, 4))
    np.testing.assert_array_equal(written.sum(axis=(1, 2)), lens.sum(1))


@several
def test_without_blocks_on_one_device_a_sequence_grows_on_none():
    """Of two blocks on each device the first sequence takes one of the first device."""
    state = start(problem_of(), 4, num_blocks=2)

    def on_each(pool, new):
        pool = jax.tree.map(lambda leaf: leaf[0], pool)
        pool, _, ok = example.grow(pool, new, num_tokens=64, max_query_len=32)
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


@pytest.mark.parametrize(
    ("spec", "dtype", "word"),
    [
        (AttentionSpec(sliding_window=4), np.float32, "sliding_window"),
        (AttentionSpec(alibi_slopes=(0.5,) * 4), np.float32, "alibi_slopes"),
        (AttentionSpec(), jnp.int8, "eight bits"),
    ],
)
def test_what_would_not_be_exact_is_refused_by_name(spec, dtype, word):
    refuse = partial(example.require_exact, init_kv_cache(4, 4, 2, 16, dtype))
    with pytest.raises(UnsupportedError, match=word):
        refuse(spec)

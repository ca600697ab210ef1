"""Attention over caches in eight bits, by the oracle, which is given what they hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SPECS, may_refuse, mixed, run
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagedattn import AttentionSpec, KVCache, UnsupportedError, paged_attention, write_kv
from pagedattn._dispatch.backend import Backend
from pagedattn._dispatch.registry import Framework, can_load
from pagedattn.backends import xla
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem
from pagedattn.testing.features import CACHE_DTYPES


@pytest.fixture
def backend(backend):
    """Those that read such caches."""
    if may_refuse(backend, "cache_dtype"):
        pytest.skip(f"{backend} refuses caches in eight bits")
    return backend


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_any_dtype_of_queries_with_any_of_caches(backend, cache_dtype, dtype):
    problem = mixed(SPECS["all"], cache_dtype=cache_dtype, dtype=np.dtype(dtype))
    assert_attention_close(*run(problem, backend), problem, name=backend)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("head_dim", [20, 32, 64, 128])
def test_heads_of_any_width(backend, cache_dtype, head_dim):
    """Of a decode, of several queries, and of a prompt."""
    sizes = {"cache_dtype": cache_dtype, "head_dim": head_dim, "num_heads": 6}
    sizes["dtype"] = np.dtype("bfloat16")
    problem = random_problem([1, 3, 40], [81, 9, 70], SPECS["plain"], **sizes)
    assert_attention_close(*run(problem, backend), problem, name=backend)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_scales_of_every_kind(backend, cache_dtype):
    problem = mixed(cache_dtype=cache_dtype)
    heads = np.float32([0.7, 0.01])
    for scales in ((None, None), (np.float32(0.1), None), (None, heads), (heads, heads)):
        changed = problem.replace(key_scale=scales[0], value_scale=scales[1])
        if changed.key_scale is None and cache_dtype != "float8_e5m2":
            changed = changed.replace(query=changed.query / 100)
        assert_attention_close(*run(changed, backend), changed, name=backend)


def at_magnitudes(powers, dtype, cache_dtype):
    """A problem whose keys' scales are far from 1; its logits and values are not."""
    problem = mixed(AttentionSpec(), cache_dtype=cache_dtype, dtype=np.dtype(dtype))
    scales = (problem.key_scale * 2.0 ** np.array(powers)).astype(np.float32)
    spec = AttentionSpec(scale=0.25 / 2.0 ** max(powers))
    return problem.replace(key_scale=scales, spec=spec)


MAGNITUDES = st.builds(
    at_magnitudes,
    st.lists(st.integers(-40, 20), min_size=2, max_size=2)
    | st.integers(-40, 20).map(lambda power: [power] * 2),
    st.sampled_from(["float16", "bfloat16", "float32"]),
    st.sampled_from(CACHE_DTYPES),
)


@settings(max_examples=8)
@given(problem=MAGNITUDES)
@example(problem=at_magnitudes([-24, -24], "float16", "int8"))
@example(problem=at_magnitudes([20, 3], "float16", "int8"))
def test_scales_of_any_magnitude(backend, problem):
    """A query times the scale of its keys may be beyond its dtype's range."""
    assert_attention_close(*run(problem, backend), problem, name=backend)
    if can_load(backend, Framework.TORCH):
        from tensors import by_torch

        assert_attention_close(*by_torch(problem, backend), problem, name=backend)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_caches_of_numpy(backend, cache_dtype):
    """Outside jit: integers of NumPy's are tables, but for a cache of int8."""
    problem = mixed(cache_dtype=cache_dtype)
    cache = jax.tree.map(np.asarray, cache_of(problem))
    query, batch = jnp.asarray(problem.query), batch_of(problem)
    got = paged_attention(query, cache, batch, problem.spec, backend=backend, return_lse=True)
    assert_attention_close(*got, problem, name=backend)


def test_what_is_written_is_read(backend):
    """From floats to the cache to attention, all in one program."""
    problem = random_problem([5, 9], [5, 9], SPECS["plain"], cache_dtype="int8", num_blocks=6)
    batch, cache = batch_of(problem), cache_of(problem)
    rows = np.random.default_rng(0).standard_normal((2, 14, 2, 16)).astype(np.float32)

    @jax.jit
    def step(query, cache, key, value):
        cache = write_kv(cache, key, value, batch.slot_mapping)
        return cache, *paged_attention(query, cache, batch, backend=backend, return_lse=True)

    cache, out, lse = step(jnp.asarray(problem.query), cache, *jnp.asarray(rows))
    held = problem.replace(key_cache=np.asarray(cache.key), value_cache=np.asarray(cache.value))
    assert_attention_close(out, lse, held, name=backend)


def test_gradients_of_queries(backend):
    """The same as over a cache of floats that holds the same."""
    problem = mixed(cache_dtype="int8", poison=None)
    batch, cache = batch_of(problem), cache_of(problem)
    floats = [
        jnp.asarray(plane.astype(np.float32) * scale.reshape(-1, 1))
        for plane, scale in (
            (problem.key_cache, problem.key_scale),
            (problem.value_cache, problem.value_scale),
        )
    ]

    def loss(query, cache):
        return (paged_attention(query, cache, batch, backend=backend) ** 2).sum()

    gradient = jax.jit(jax.grad(loss))
    query = jnp.asarray(problem.query)
    want = gradient(query, KVCache(*floats))
    np.testing.assert_allclose(gradient(query, cache), want, rtol=1e-4, atol=1e-5)


def test_gradients_of_scales_over_poison(backend):
    """Padding tokens hold NaN, and so do their cotangents; neither reaches a scale."""
    problem = mixed(cache_dtype="int8")
    query, cache, batch = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)

    def attend(scales, query):
        held = KVCache(cache.key, cache.value, *scales)
        return paged_attention(query, held, batch, backend=backend)

    def gradient(query, padding):
        out, pull = jax.vjp(attend, (cache.key_scale, cache.value_scale), query)
        return pull(jnp.ones_like(out).at[18:].set(padding))

    want = gradient(query.at[18:].set(0), 0)
    got = jax.jit(gradient)(query, jnp.nan)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("named", [True, False])
def test_scales_are_given_to_a_backend_that_names_them_and_to_no_other(named):
    """Else they are done around it: what it is given is multiplied, and what it gives."""
    given = []

    def own(call, query, cache, batch):
        given.append((query, cache.key_scale, cache.value_scale))
        return jnp.ones(call.out_shape), None

    problem = mixed(cache_dtype="int8").replace(key_scale=np.float32(2), value_scale=np.float32(3))
    backend = Backend("own", xla.SUPPORTS | ({"scales"} if named else set()), own)
    query = jnp.asarray(problem.query)
    out = paged_attention(query, cache_of(problem), batch_of(problem), backend=backend)
    ((got, *scales),) = given
    assert scales == ([2, 3] if named else [None, None])
    np.testing.assert_array_equal(got, query if named else 2 * query.at[18:].set(0))
    np.testing.assert_array_equal(out[:18], 1 if named else 3)


def test_a_backend_that_cannot_widen_its_loads_refuses_by_name():
    poor = Backend("poor", xla.SUPPORTS - {"cache_dtype"}, xla.run)
    problem = mixed(cache_dtype="float8_e5m2")
    with pytest.raises(UnsupportedError, match="cache_dtype: poor does not have it"):
        run(problem, poor, "eager")

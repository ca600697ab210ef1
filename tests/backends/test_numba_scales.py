"""Scales of a cache in eight bits, which the compiled kernel itself multiplies by."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SPECS, run
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import by_torch

from pagedattn import KVCache, paged_attention
from pagedattn._dispatch.registry import can_load
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem

if not can_load("numba") or jax.default_backend() != "cpu":
    pytest.skip("needs numba, and JAX on a CPU", allow_module_level=True)


def scales(num_kv_heads):
    """None, one number, or one for each KV head."""
    some = st.floats(2**-6, 2**6, width=32).map(np.float32)
    each = st.lists(some, min_size=num_kv_heads, max_size=num_kv_heads).map(np.float32)
    return st.none() | some | each


@pytest.mark.parametrize("way", ["jit", "torch"])
@settings(max_examples=15)
@given(data=st.data())
def test_scales_of_any_kind_with_anything(way, data):
    """Also where some queries are longer than the kernel's; by the oracle."""
    sizes = data.draw(st.sampled_from([([1, 2, 0, 1], [33, 70, 5, 0]), ([40, 1], [50, 30])]))
    cache = data.draw(st.sampled_from([{}, {"value_dim": 8}, {"value_dim": 8, "latent": True}]))
    spec, dtype = SPECS[data.draw(st.sampled_from(["plain", "all"]))], jnp.dtype("bfloat16")
    problem = random_problem(*sizes, spec, dtype=dtype, cache_dtype="int8", **cache)
    key_scale, value_scale = data.draw(scales(2)), data.draw(scales(2))
    latent = "latent" in cache
    changed = problem.replace(key_scale=key_scale, value_scale=None if latent else value_scale)
    size = 1 if key_scale is None else np.max(key_scale)  # logits stay as large as they were
    ratio = np.float32(np.max(problem.key_scale) / size)
    changed = changed.replace(query=(problem.query * ratio).astype(dtype))
    if way == "jit":
        assert_attention_close(*run(changed, "numba"), changed)
    else:
        assert_attention_close(*by_torch(changed, "numba"), changed)


@pytest.mark.parametrize("return_lse", [False, True])
def test_xla_computes_nothing_around_the_kernel_for_scales(return_lse):
    """The program is one call of the kernel, but for the plan."""
    problem = random_problem([1, 1], [9, 30], SPECS["plain"], cache_dtype="int8")
    query = jnp.asarray(problem.query, jnp.bfloat16)
    call = jax.jit(partial(paged_attention, backend="numba", return_lse=return_lse))
    text = call.lower(query, cache_of(problem), batch_of(problem)).as_text()
    assert text.count("pagedattn_numba_attention") == 1
    assert not {"multiply", "convert", "reshape"} & set(re.findall(r"stablehlo\.(\w+)", text))


def test_gradients_of_scales():
    """One number and one for each head: as by xla, around which scales are multiplied."""
    problem = random_problem([1, 2], [9, 30], SPECS["plain"], cache_dtype="int8", poison=None)
    batch, cache = batch_of(problem), cache_of(problem)

    def loss(scales, backend):
        held = KVCache(cache.key, cache.value, *scales)
        out = paged_attention(jnp.asarray(problem.query), held, batch, backend=backend)
        return (out**2).sum()

    scales = jnp.float32(0.02), jnp.asarray([0.5, 2.0], jnp.bfloat16)
    got, want = (jax.jit(jax.grad(partial(loss, backend=b)))(scales) for b in ("numba", "xla"))
    for x, y in zip(got, want, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_allclose(x.astype(np.float32), y.astype(np.float32), rtol=1e-2)
        assert jnp.any(x != 0)

"""Gradients against finite differences; rows without keys give zeros, never NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SPECS, attend_with_any_lse, honoured, mixed
from conftest import BACKENDS, PARTIAL
from jax.test_util import check_grads

from pagedattn import AttentionSpec, KVCache, make_batch, paged_attention, write_kv
from pagedattn.testing import batch_of, cache_of, random_problem


def functions(problem, backend):
    """A scalar function of query, key and value planes, and where to take it."""
    problem = honoured(problem, backend)
    batch = batch_of(problem)
    seen = jnp.asarray(problem.visible_slots)[:, :, None, None]
    rng = np.random.default_rng(5)
    weights = jnp.asarray(rng.standard_normal(problem.query.shape), jnp.float32)
    lse_weights = jnp.asarray(rng.standard_normal(problem.query.shape[:2]), jnp.float32)

    def loss(query, key, value):
        cache = KVCache(key, value)
        out, lse = attend_with_any_lse(query, cache, batch, problem.spec, backend)
        finite = jnp.where(jnp.isfinite(lse), lse, 0.0)
        return (out * weights).sum() + (finite * lse_weights).sum()

    cache = cache_of(problem)
    return loss, (jnp.asarray(problem.query), cache.key, cache.value), seen


# Backends without gradients of their own recompute by xla, given the whole spec or none of it.
OTHERS = [name for name in (*BACKENDS, *PARTIAL) if name != "xla"]
GRADIENTS = [("xla", name) for name in SPECS]
GRADIENTS += [(other, name) for other in OTHERS for name in ("plain", "all")]


@pytest.mark.parametrize(("backend", "name"), GRADIENTS)
def test_finite_differences(backend, name):
    """Reverse mode, in float32, over a mixed batch with rows that see no key."""
    problem = random_problem(
        [3, 4, 1, 0, 2], [3, 9, 10, 5, 1], SPECS[name], pad_tokens=12, poison=None, max_query_len=4
    )
    loss, args, _ = functions(problem, backend)
    check_grads(jax.jit(loss), args, order=1, modes=["rev"], atol=2e-2, rtol=2e-2, eps=1e-2)


@pytest.mark.parametrize(("name", "jit"), [("causal=False", True), ("all", False)])
def test_gradients_agree_between_backends(name, jit):
    """The same to float32 rounding, and zero wherever no query looks, even over NaN."""
    loss, args, seen = functions(mixed(SPECS[name]), "xla")
    want = jax.jit(jax.grad(loss, (0, 1, 2)))(*args)
    other = functions(mixed(SPECS[name]), "sdpa")[0]
    got = jax.grad(jax.jit(other) if jit else other, (0, 1, 2))(*args)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for plane in want[1:]:
        assert not np.asarray(jnp.where(seen, 0, plane)).any()
        assert np.abs(np.asarray(plane)).max() > 1e-3


@pytest.mark.parametrize(("name", "jit"), [("plain", False), ("causal=False", True), ("all", True)])
def test_masked_rows_and_poison_give_zero_gradients(backend, name, jit):
    """Padding rows hold NaN, and the queries of the first sequence see no key at all."""
    problem = random_problem([3, 2, 4], [0, 5, 9], SPECS[name], pad_tokens=11, max_query_len=4)
    loss, args, _ = functions(problem, backend)
    grad = jax.grad(loss, (0, 1, 2))
    grads = (jax.jit(grad) if jit else grad)(*args)
    for x in grads:
        assert np.isfinite(np.asarray(x)).all()
    assert not np.asarray(grads[0][:3]).any()
    assert not np.asarray(grads[0][9:]).any()
    assert np.asarray(grads[0][3:9]).any()


def test_gradients_flow_through_the_write(backend):
    """d out / d new key and value: dropped tokens get zero."""
    problem = mixed(poison=None)
    batch, cache = batch_of(problem), cache_of(problem)
    query = jnp.asarray(problem.query)
    key, value = jax.random.normal(jax.random.key(1), (2, 20, 2, 16))

    def loss(key, value):
        full = write_kv(cache, key, value, batch.slot_mapping)
        return (paged_attention(query, full, batch, backend=backend) ** 2).sum()

    grads = jax.jit(jax.grad(loss, (0, 1)))(key, value)
    for x in grads:
        assert np.isfinite(np.asarray(x)).all()
        assert not np.asarray(x[18:]).any()  # padding tokens, slot -1
        assert np.asarray(x[:18]).any(axis=(1, 2)).all()
    check_grads(jax.jit(loss), (key, value), order=1, modes=["rev"], atol=5e-2, rtol=5e-2, eps=1e-2)


def test_value_gradient_by_hand(backend):
    """One query over one visible key: the weight is 1, so d out / d value is the cotangent."""
    problem = random_problem([1], [1], SPECS["plain"], num_heads=2, num_kv_heads=1)
    batch, cache = batch_of(problem), cache_of(problem)

    def out(value):
        cache_ = KVCache(cache.key, value)
        return paged_attention(jnp.asarray(problem.query), cache_, batch, backend=backend)

    cotangent = jnp.arange(32.0).reshape(1, 2, 16)
    (got,) = jax.vjp(out, cache.value)[1](cotangent)
    block = problem.block_tables[0][0]
    np.testing.assert_allclose(got[block, 0, 0], cotangent[0, 0] + cotangent[0, 1], rtol=1e-6)
    assert not np.asarray(got.at[block, 0].set(0)).any()


def test_half_dtypes_keep_their_dtype(backend):
    dtype = {"xla": jnp.bfloat16}.get(backend, jnp.float16)
    problem = mixed(SPECS["all"], dtype=np.dtype(dtype))
    loss, args, _ = functions(problem, backend)
    grads = jax.grad(loss, (0, 1, 2))(*args)
    assert [x.dtype for x in grads] == [dtype] * 3
    for x in grads:
        assert np.isfinite(np.asarray(x, np.float32)).all()


@pytest.mark.parametrize("scale", [0.01, 0.3])
@pytest.mark.parametrize("result", [0, 1])
def test_every_key_has_a_gradient_as_exact_as_its_weight(scale, result):
    """Against the analytic gradient in float64, over 4096 keys of nearly equal weight.

    A gradient through the shift by the highest logit cancels, but for rounding errors of the sum
    over all keys: one key would bear them all.
    """
    rng = np.random.default_rng(0)
    length, dim = 4096, 8
    query, cotangent = rng.standard_normal((2, 1, 1, dim)).astype(np.float32)
    key, value = rng.standard_normal((2, length // 16, 16, 1, dim)).astype(np.float32)
    batch = make_batch([1], [length - 1], [range(length // 16)], block_size=16)
    spec = AttentionSpec(scale=scale)

    def loss(key):
        cache = KVCache(key, jnp.asarray(value))
        results = paged_attention(query, cache, batch, spec, backend="xla", return_lse=True)
        return (results[0] * cotangent).sum() if result == 0 else results[1].sum()

    q, g = query.astype(np.float64).ravel(), cotangent.astype(np.float64).ravel()
    weights = np.exp(scale * key.astype(np.float64).reshape(-1, dim) @ q)
    weights /= weights.sum()
    worth = value.astype(np.float64).reshape(-1, dim) @ g
    d_logits = weights * (worth - weights @ worth) if result == 0 else weights
    error = np.asarray(jax.grad(loss)(key)).reshape(-1, dim) - scale * np.outer(d_logits, q)
    share = np.abs(error).max(axis=1) / (scale * weights * np.abs(q).max())
    assert share.max() < 1e-5, (share.argmax(), share.max())

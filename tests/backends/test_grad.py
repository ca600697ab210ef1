"""Gradients against finite differences; rows without keys give zeros, never NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    BACKENDS,
    PARTIAL,
    SPECS,
    assert_same,
    attend_with_any_lse,
    mixed,
    random_cache,
    rows,
    supported,
)

from pagedattn import (
    AttentionSpec,
    KVCache,
    copy_blocks,
    fill_blocks,
    make_batch,
    paged_attention,
    write_kv,
)
from pagedattn.testing import batch_of, cache_of, random_problem


def problem_of(name, query_lens=(3, 4, 1, 0, 2), seq_lens=(3, 9, 10, 5, 1), **options):
    """A mixed batch with rows that see no key. All are of one shape, and so share programs."""
    sizes = {"pad_tokens": 12, "num_blocks": 16, "max_query_len": 4} | options
    padding = [0] * (5 - len(query_lens))
    problem = random_problem([*query_lens, *padding], [*seq_lens, *padding], SPECS[name], **sizes)
    tables = [[*row, *[-1] * (3 - len(row))] for row in problem.block_tables]
    return problem.replace(block_tables=tables)


def loss(query, key, value, batch, weights, *, spec, backend):
    """A scalar of both results, if the backend gives both."""
    out, lse = attend_with_any_lse(query, KVCache(key, value), batch, spec, backend)
    if lse is None:
        return (out * weights[0]).sum()
    finite = jnp.where(jnp.isfinite(lse), lse, 0.0)
    return (out * weights[0]).sum() + (finite * weights[1]).sum()


loss_in_jit = jax.jit(loss, static_argnames=("spec", "backend"))
both = jax.value_and_grad(loss, (0, 1, 2))
both_in_jit = jax.jit(both, static_argnames=("spec", "backend"))


def arguments(problem, backend):
    """Those of `loss`: arrays, and what is static."""
    problem = supported(problem, backend)
    rng = np.random.default_rng(5)
    shapes = problem.query.shape, problem.query.shape[:2]
    weights = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    cache = cache_of(problem)
    arrays = jnp.asarray(problem.query), cache.key, cache.value, batch_of(problem), weights
    return arrays, {"spec": problem.spec, "backend": backend}


def assert_derivatives(function, grads, args, tolerance):
    """Differences along a random direction of each argument; `grads` are the gradients there."""
    rng = np.random.default_rng(6)
    for i, (x, slope) in enumerate(zip(args, grads, strict=True)):
        along = jnp.asarray(rng.standard_normal(x.shape), x.dtype)
        ahead, behind = (
            function(*args[:i], x + step * along, *args[i + 1 :]) for step in (1e-2, -1e-2)
        )
        want = (ahead - behind) / 2e-2
        np.testing.assert_allclose((slope * along).sum(), want, rtol=tolerance, atol=tolerance)


# Backends without gradients of their own recompute by xla, given the whole spec or none of it.
OTHERS = [name for name in (*BACKENDS, *PARTIAL) if name != "xla"]
GRADIENTS = [("xla", name) for name in SPECS]
GRADIENTS += [(other, name) for other in OTHERS for name in ("plain", "all")]


@pytest.mark.parametrize(("backend", "name"), GRADIENTS)
def test_finite_differences(backend, name):
    """Reverse mode, in float32."""
    (*args, batch, weights), static = arguments(problem_of(name, poison=None), backend)

    def value(*args):
        return both_in_jit(*args, batch, weights, **static)[0]

    assert_derivatives(value, both_in_jit(*args, batch, weights, **static)[1], args, 2e-2)


@pytest.mark.parametrize(("name", "jit"), [("causal=False", True), ("all", False)])
def test_gradients_agree_between_backends(name, jit):
    """The same to float32 rounding, and zero wherever no query looks, even over NaN."""
    pytest.importorskip("torch")
    problem = problem_of(name)
    args, static = arguments(problem, "xla")
    _, want = both_in_jit(*args, **static)
    args, static = arguments(problem, "sdpa")
    got = jax.grad(loss_in_jit if jit else loss, (0, 1, 2))(*args, **static)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for plane in want[1:]:
        assert not np.where(problem.visible_slots[..., None], 0, plane).any()
        assert np.abs(np.asarray(plane)).max() > 1e-3


@pytest.mark.parametrize(("name", "jit"), [("plain", False), ("causal=False", True), ("all", True)])
def test_masked_rows_and_poison_give_zero_gradients(backend, name, jit):
    """Padding rows hold NaN, and the queries of the first sequence see no key at all."""
    args, static = arguments(problem_of(name, [3, 2, 4], [0, 5, 9]), backend)
    _, grads = (both_in_jit if jit else both)(*args, **static)
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

    @jax.jit
    def loss(key, value):
        full = write_kv(cache, key, value, batch.slot_mapping)
        return (paged_attention(query, full, batch, backend=backend) ** 2).sum()

    grads = jax.grad(loss, (0, 1))(key, value)
    for x in grads:
        assert np.isfinite(np.asarray(x)).all()
        assert not np.asarray(x[18:]).any()  # padding tokens, slot -1
        assert np.asarray(x[:18]).any(axis=(1, 2)).all()
    assert_derivatives(loss, grads, (key, value), 5e-2)


WRITES = {
    "write_kv": lambda cache, key, value: write_kv(cache, key, value, jnp.array([9, -1, 2])),
    "copy_blocks": lambda cache, *_: copy_blocks(cache, jnp.array([0, 2]), jnp.array([2, -1])),
    "fill_blocks": lambda cache, *_: fill_blocks(cache, jnp.array([1, -1])),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", WRITES)
def test_writes_have_derivatives_of_every_mode(name, dtype):
    """They are linear: their tangents are themselves, and those of gradients of their squares."""
    write = WRITES[name]
    cache = random_cache(dtype=np.dtype(dtype))
    args = cache, *rows(3, cache)

    def squares(args):
        return sum((plane.astype(jnp.float32) ** 2).sum() for plane in write(*args).planes) / 2

    out, along = jax.jit(lambda args: jax.jvp(lambda *args: write(*args), args, args))(args)
    assert_same(out, write(*args))
    assert_same(along, out)
    slopes, again = jax.jit(lambda args: jax.jvp(jax.grad(squares), (args,), (args,)))(args)
    assert_same(again, slopes)
    exact = jax.grad(squares)(jax.tree.map(lambda x: x.astype(jnp.float32), args))
    assert_same(jax.tree.map(lambda x: x.astype(jnp.float32), slopes), exact)


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
    args, static = arguments(problem_of("all", dtype=np.dtype(dtype)), backend)
    _, grads = both_in_jit(*args, **static)
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

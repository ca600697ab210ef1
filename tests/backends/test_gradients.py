"""Gradients against the analytic ones of the formula, in float64, token by token."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BACKENDS, SPECS
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedattn import AttentionSpec, KVCache, Selection, paged_attention
from pagedattn.testing import batch_of, oracle
from pagedattn.testing.strategies import BUCKETS, options_table, problems, seeds
from pagedattn.testing.tolerances import arguments

BUCKET = BUCKETS[0]
# Those that are no floats, caches in eight bits, have none.
ARRAYS = ("query", "key_cache", "value_cache", "key_scale", "value_scale", "sinks", "bias")


def differentiated(problem):
    """The arrays of a problem that have gradients, by their names."""
    arrays = {name: getattr(problem, name) for name in ARRAYS}
    return {name: x for name, x in arrays.items() if x is not None and x.dtype == np.float32}


def by_formula(problem, d_out, d_lse):
    """float64 gradients of `sum(out * d_out) + sum(lse * d_lse)`, by the names of the arrays."""
    grads = {name: np.zeros(x.shape) for name, x in _all_arrays(problem).items()}
    num_heads = problem.query.shape[1]
    order = itertools.product(range(len(problem.seq_lens)), range(num_heads))
    for (seq, index), head in zip(order, oracle.heads(**arguments(problem)), strict=True):
        of_head = _of_head(head, problem.spec, d_out[head.rows, index], d_lse[head.rows, index])
        _add(grads, problem, seq, head, of_head)
    return grads


def _all_arrays(problem):
    arrays = {name: getattr(problem, name) for name in ARRAYS}
    return {name: x for name, x in arrays.items() if x is not None}


def _of_head(head, spec, d_out, d_lse):
    """Gradients of one head's query, keys, values, sink and bias."""
    scale = head.query.shape[-1] ** -0.5 if spec.scale is None else spec.scale
    score = oracle.logits(head, spec)
    weights, lse = oracle.softmax(score, head.sink)
    toward_all = d_lse - (d_out * (weights @ head.values)).sum(-1)
    d_logits = weights * (d_out @ head.values.T + toward_all[:, None])
    # Of a token that sees no key the lse is the sink, of -inf too.
    blind = np.isneginf(score).all(axis=1)
    share = np.where(blind, 1, np.exp(head.sink - np.where(blind, 0, lse)))
    d_sink = (share * toward_all).sum()
    d_dots = scale * d_logits
    if spec.logits_soft_cap is not None:
        dots = scale * head.query @ head.keys.T
        d_dots = d_dots / np.cosh(dots / spec.logits_soft_cap) ** 2
    return d_dots @ head.keys, d_dots.T @ head.query, weights.T @ d_out, d_sink, d_logits


def _add(grads, problem, seq, head, of_head):
    d_query, d_keys, d_values, d_sink, d_bias = of_head
    grads["query"][head.rows, head.index] += d_query
    if "sinks" in grads:
        grads["sinks"][head.index] += d_sink
    if "bias" in grads:
        grads["bias"][head.rows, min(head.index, grads["bias"].shape[1] - 1), : len(d_keys)] += (
            d_bias
        )
    kv_head = head.index * problem.key_cache.shape[2] // problem.query.shape[1]
    seen = np.flatnonzero(oracle.wanted_keys(head.visible, problem.bias, head.rows))
    if problem.value_cache is None:
        d_keys[:, : problem.value_dim] += d_values
        d_values = None
    for name, rows in (("key", d_keys), ("value", d_values)):
        if rows is not None:
            _add_rows(grads, problem, name, seq, kv_head, seen, rows)


def _add_rows(grads, problem, name, seq, kv_head, seen, rows):
    """Those of a sequence's keys or values, to their slots, and to the scale of their KV head."""
    plane, scale = getattr(problem, f"{name}_cache"), getattr(problem, f"{name}_scale")
    for j in seen:
        block, offset = (
            int(problem.block_tables[seq][j // problem.block_size]),
            j % problem.block_size,
        )
        held = oracle.numbers(plane[block, offset, kv_head])
        if problem.token_scales:
            of_groups = (rows[j] * held).reshape(scale[block, offset, kv_head].size, -1).sum(1)
            of_slot = grads[f"{name}_scale"][block, offset, kv_head : kv_head + 1]
            of_slot += of_groups.reshape(of_slot.shape)
            continue
        factor = 1.0 if scale is None else np.broadcast_to(scale, plane.shape[2])[kv_head]
        grads[f"{name}_cache"][block, offset, kv_head] += factor * rows[j]
        if scale is not None:
            grads[f"{name}_scale"][() if scale.ndim == 0 else kv_head] += rows[j] @ held


@functools.partial(jax.jit, static_argnames=("spec", "value_dim", "backend"))
def by_library(given, fixed, batch, cotangents, spec, *, value_dim, backend):
    def attend(given):
        arrays = fixed | given
        planes = arrays["key_cache"], arrays.get("value_cache")
        scales = arrays.get("key_scale"), arrays.get("value_scale")
        cache = KVCache(*planes, *scales, value_dim=value_dim)
        options = {name: arrays[name] for name in ("sinks", "bias") if name in arrays}
        if "selection" in arrays:
            options["selection"] = Selection(arrays["selection"])
        options |= {"backend": backend, "return_lse": True}
        return paged_attention(arrays["query"], cache, batch, spec, **options)

    (gradients,) = jax.vjp(attend, given)[1](cotangents)
    return gradients


def check(problem, backend, seed):
    rng = np.random.default_rng(seed)
    d_out = rng.standard_normal(problem.out_shape).astype(np.float32)
    d_lse = rng.standard_normal(problem.query.shape[:2]).astype(np.float32)
    given = differentiated(problem)
    fixed = {name: x for name, x in _all_arrays(problem).items() if name not in given}
    if problem.selection is not None:
        fixed["selection"] = problem.selection
    given, fixed = jax.tree.map(jnp.asarray, (given, fixed))
    static = {"value_dim": problem.value_dim, "backend": backend}
    arrays = given, fixed, batch_of(problem), (d_out, d_lse)
    got = by_library(*arrays, problem.spec, **static)
    want = by_formula(problem, d_out.astype(float), d_lse.astype(float))
    for name, gradient in got.items():
        size = np.abs(want[name]).max(initial=1)
        np.testing.assert_allclose(gradient, want[name], rtol=1e-4, atol=1e-5 * size, err_msg=name)


@pytest.mark.parametrize("name", options_table(BUCKET.num_heads))
@settings(max_examples=5)
@given(data=st.data(), seed=seeds())
def test_gradients_of_all_options(name, data, seed):
    """Of query, cache, scales, sinks and bias, through out and lse; heads share KV heads."""
    options = options_table(BUCKET.num_heads)[name]._asdict()
    cross = data.draw(st.booleans())
    check(data.draw(problems(bucket=BUCKET, dtype=np.float32, cross=cross, **options)), "xla", seed)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "xla"])
@pytest.mark.parametrize("spec", [SPECS["all"], AttentionSpec(causal=False, sliding_window=4)])
@settings(max_examples=4)
@given(data=st.data(), seed=seeds())
def test_gradients_of_backends_that_have_none(backend, spec, data, seed):
    check(data.draw(problems(bucket=BUCKET, dtype=np.float32, spec=spec)), backend, seed)

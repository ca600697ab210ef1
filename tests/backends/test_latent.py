"""Values of another width than keys, in a plane of their own or among the keys' columns."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from cases import SPECS, mixed, run
from hypothesis import given
from hypothesis import strategies as st
from pagedattn_interop import to_torch
from tensors import by_torch

import pagedattn_torch
from pagedattn import (
    AttentionSpec,
    InvalidInputError,
    KVCache,
    UnsupportedError,
    explain,
    paged_attention,
    ragged_attention,
)
from pagedattn._dispatch.registry import can_load
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem
from pagedattn.testing import reference_attention as reference
from pagedattn.testing.strategies import BUCKETS, problems

BUCKET = BUCKETS[0]
ON_CPU = can_load("numba") and jax.default_backend() == "cpu"
LATENT = {"value_dim": 8, "latent": True}
WITH_TORCH = ["sdpa", *["numba"] * ON_CPU]
WAYS = [(name, way) for name in ("xla", *WITH_TORCH) for way in ("eager", "jit")]
WAYS += [(name, "torch") for name in WITH_TORCH]


@pytest.fixture(params=["xla", *WITH_TORCH])
def backend(request):
    """Those that have such values."""
    return request.param


def split(problem):
    """A latent problem with its values in a plane of their own."""
    value = problem.key_cache[..., : problem.value_dim].copy()
    return problem.replace(value_cache=value, value_scale=problem.key_scale, value_dim=None)


@pytest.mark.parametrize(("backend", "way"), WAYS)
@given(data=st.data())
def test_a_latent_cache_is_one_whose_values_are_columns_of_its_keys(backend, way, data):
    name, cache_dtype = data.draw(st.sampled_from([("plain", None), ("all", "int8")]))
    cache = LATENT | {"cache_dtype": cache_dtype}
    options = {"spec": SPECS[name], "cache": cache, "bucket": BUCKET, "dtype": np.float32}
    problem = data.draw(problems(**options))
    call = by_torch if way == "torch" else lambda problem, name: run(problem, name, way)
    got, want = call(problem, backend), call(split(problem), backend)
    assert got[0].shape == problem.out_shape == (*problem.query.shape[:2], 8)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    assert_attention_close(*got, problem, name=backend)


@pytest.mark.parametrize(
    ("dtype", "cache"),
    [
        (np.float32, {"value_dim": 24}),  # wider than the keys
        (ml_dtypes.bfloat16, {"value_dim": 1}),
        (np.float16, {"value_dim": 8}),
        (np.float32, {"value_dim": 16, "latent": True}),  # the keys are the values
        (np.float16, {"value_dim": 5, "latent": True}),
        (ml_dtypes.bfloat16, {"value_dim": 5, "latent": True, "cache_dtype": "float8_e4m3fn"}),
    ],
    ids=str,
)
def test_widths(backend, cache, dtype):
    problem = mixed(SPECS["all"], dtype=np.dtype(dtype), arrays=["sinks", "bias"], **cache)
    out, lse = run(problem, backend, "eager")
    assert out.dtype == dtype
    assert_attention_close(out, lse, problem, name=backend)
    if backend in WITH_TORCH:
        assert_attention_close(*by_torch(problem, backend), problem, name="torch")


def test_poison_in_columns_that_are_no_values_reaches_no_value(backend):
    """NaN in the slots that no query sees changes no bit, of rows with and without keys."""
    clean = mixed(SPECS["sliding_window"], poison=None, **LATENT)
    want, got = run(clean, backend), run(clean.poisoned(), backend)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)


def plainly(problem):
    """Attention as a function of query and latents, sequence by sequence, without a library."""
    starts, scale = problem.query_start_loc, problem.query.shape[2] ** -0.5

    def attend(query, latent):
        outs = []
        for s, (new, length) in enumerate(zip(problem.query_lens, problem.seq_lens, strict=True)):
            row = jnp.asarray(problem.block_tables[s], jnp.int32)
            keys = latent[row].reshape(-1, latent.shape[3])[:length]
            rows = query[starts[s] : starts[s + 1]]
            hidden = jnp.arange(length) > jnp.arange(length - new, length)[:, None]
            logits = scale * jnp.einsum("qhd,kd->hqk", rows, keys)
            weights = jax.nn.softmax(jnp.where(hidden, -jnp.inf, logits), axis=-1)
            outs.append(jnp.einsum("hqk,kd->qhd", weights, keys[:, : problem.value_dim]))
        return jnp.concatenate(outs)

    return attend


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("jit", [False, True])
def test_gradients_are_those_of_the_plain_formula(backend, jit):
    """Of the query, and of the latents, which get them as keys and as values."""
    sizes = {"num_kv_heads": 1, "poison": None}
    problem = random_problem([3, 1], [7, 5], AttentionSpec(), **sizes, **LATENT)
    batch, arrays = batch_of(problem), (jnp.asarray(problem.query), cache_of(problem).key)
    weights = jax.random.normal(jax.random.key(0), problem.out_shape)

    def loss(query, latent):
        cache = KVCache(latent, None, value_dim=problem.value_dim)
        return (paged_attention(query, cache, batch, backend=backend) * weights).sum()

    want = jax.jit(jax.grad(lambda *a: (plainly(problem)(*a) * weights).sum(), (0, 1)))(*arrays)
    gradient = jax.grad(loss, (0, 1))
    for x, y in zip((jax.jit(gradient) if jit else gradient)(*arrays), want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_packed_keys_with_narrower_values(backend):
    """As in the prompts of multi-head latent attention before its projections are absorbed."""
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 5, 2, 12)).astype(np.float32)
    value, starts = rng.standard_normal((5, 2, 8)).astype(np.float32), np.array([0, 2, 5])
    options = {"max_query_len": 3, "max_key_len": 3, "return_lse": True}
    pools, tables = (key[:, None], value[:, None]), [range(2), range(2, 5)]
    want = reference(query, *pools, tables, [2, 3], starts, AttentionSpec())
    got = [ragged_attention(query, key, value, starts, starts, backend=backend, **options)]
    if backend in WITH_TORCH:
        tensors = map(torch.from_numpy, (query, key, value, starts, starts))
        got.append(pagedattn_torch.ragged_attention(*tensors, backend=backend, **options))
    for out, lse in got:
        np.testing.assert_allclose(out, want[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse, want[1], rtol=1e-5, atol=1e-6)
    none = ragged_attention(query, key[:0], value[:0], starts, 0 * starts, **options)
    assert none[0].shape == (5, 2, 8)
    assert not none[0].any()


@pytest.mark.parametrize("cache", [{"value_dim": 8}, LATENT], ids=str)
def test_others_refuse_by_name(cache):
    problem = mixed(**cache)
    arrays = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    why = explain(*arrays)
    assert why["xla"] == why["sdpa"] == []
    assert why[why.choice] == []
    loaded = {name: reasons for name, reasons in why.items() if "does not have it" in str(reasons)}
    assert all(
        reasons == [f"value_dim: {name} does not have it"] for name, reasons in loaded.items()
    )
    for name in loaded:
        with pytest.raises(UnsupportedError, match="value_dim"):
            paged_attention(*arrays, backend=name)
    plain = mixed(value_dim=16)  # a plane like the keys asks for nothing
    reasons = explain(jnp.asarray(plain.query), cache_of(plain), batch_of(plain))
    assert "value_dim" not in str(reasons)


def test_a_prepared_step_takes_no_cache_of_other_values():
    problem = mixed(**LATENT)
    query, cache = to_torch((jnp.asarray(problem.query), cache_of(problem)), copy=True)
    step = pagedattn_torch.prepare(query, cache, batch_of(problem))
    out, _ = step.attend(query, cache)
    assert out.shape == problem.out_shape
    parted = KVCache(cache.key, cache.key[..., :8].contiguous())
    for other in (dataclasses.replace(cache, value_dim=7), parted):
        with pytest.raises(InvalidInputError, match="the step was prepared for"):
            step.attend(query, other)


def test_layers_take_keys_and_values_of_one_width_only():
    for cache in ({"value_dim": 8}, LATENT):
        held = to_torch(cache_of(mixed(**cache)), copy=True)
        with pytest.raises(InvalidInputError, match="kv_cache must be"):
            pagedattn_torch.split_kv_cache(held, num_kv_heads=2, head_size=16)

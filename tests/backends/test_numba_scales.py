"""Scales of a cache in eight bits, which the compiled kernel itself multiplies by."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SPECS, run
from hard_problems import with_scales_apart
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensors import by_torch

from pagedattn import AttentionSpec, KVCache, paged_attention
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


BFLOAT16 = jnp.dtype("bfloat16")
INTEGERS = "int8", "int4"


def of_integers(cache_dtype, query=lambda numbers: numbers, seed=0, **sizes):
    """A decode of bfloat16 queries, which `query` changes, over a cache of integers."""
    kinds = {"cache_dtype": cache_dtype, "token_scales": True, "head_dim": 64, "seed": seed}
    problem = random_problem([1, 1], [9, 150], SPECS["plain"], dtype=BFLOAT16, **kinds, **sizes)
    return problem.replace(query=query(problem.query.astype(np.float32)).astype(BFLOAT16))


def as_integers(query):
    """Queries as 16-bit integers times a power of two have them; bfloat16 has all of these."""
    numbers = query.astype(np.float32)
    _, exponents = np.frexp(np.abs(numbers).max(axis=-1, keepdims=True))
    units = np.exp2(exponents - 15.0)
    return (np.round(numbers / units) * units).astype(query.dtype)


@pytest.mark.parametrize("cache_dtype", INTEGERS)
@given(power=st.integers(0, 30), column=st.integers(0, 63), seed=st.integers(0, 99))
@example(power=10, column=17, seed=25)  # keys that are 0 in that column
def test_a_column_of_queries_may_dwarf_the_others(cache_dtype, power, column, seed):
    """What of a query is 2^-15 of its largest element is lost, and nothing else."""

    def stretched(query):
        query[..., column] *= 2.0**power
        return query

    problem = of_integers(cache_dtype, stretched, seed)
    exact = problem.replace(query=as_integers(problem.query))
    assert_attention_close(*run(problem, "numba"), exact)


def biased(problem, key, bias, **changes):
    """The problem with a bias on one key of its last sequence, for every head."""
    added = np.zeros((len(problem.query), problem.query.shape[1], 150), np.float32)
    added[-1, :, key] = bias
    return problem.replace(bias=added, **changes)


def slot_of(problem, key):
    """The block and the slot of a key of the last sequence."""
    column, slot = divmod(key, problem.block_size)
    return problem.block_tables[-1][column], slot


@pytest.mark.parametrize("cache_dtype", INTEGERS)
@given(bias=st.floats(0, 14, width=32), seed=st.integers(0, 99))
def test_values_beside_an_attention_sink(cache_dtype, bias, seed):
    """Nearly all weight may lie on a key whose values are 0: out is then what the others give."""
    problem = of_integers(cache_dtype, seed=seed, poison=None)
    values = problem.value_cache.copy()
    values[slot_of(problem, 0)] = 0
    problem = biased(problem, 0, bias, value_cache=values)
    assert_attention_close(*run(problem, "numba"), problem)


@pytest.mark.parametrize("cache_dtype", INTEGERS)
@given(power=st.integers(0, 13), seed=st.integers(0, 99))
def test_a_scale_that_dwarfs_those_of_other_values(cache_dtype, power, seed):
    """Its token has next to no weight."""
    problem = of_integers(cache_dtype, seed=seed, poison=None)
    scales = problem.value_scale.copy()
    scales[slot_of(problem, 5)] *= 2**power
    problem = biased(problem, 5, -3.0 * power, value_scale=scales)
    assert_attention_close(*run(problem, "numba"), problem)


@pytest.mark.parametrize("cache_dtype", INTEGERS)
@given(power=st.integers(0, 6), column=st.integers(0, 63))
def test_a_great_column_of_queries_over_keys_of_zeros(cache_dtype, power, column):
    """The others keep their bits to a ratio of 64; docs/backends.md says what is lost beyond."""

    def stretched(query):
        query[..., column] = 2.0**power
        return query

    problem = of_integers(cache_dtype, stretched, poison=None)
    keys = problem.key_cache.copy()
    half = column % 32
    keys[..., half if cache_dtype == "int4" else column] = 0
    problem = problem.replace(key_cache=keys)
    assert_attention_close(*run(problem, "numba"), problem)


@pytest.mark.parametrize("arrays", [(), ("bias",)])
@pytest.mark.parametrize(
    "sizes",
    [(64, 40), (40, 128), (64, 192), (128, 100)],
    ids="{0[0]} and {0[1]} columns".format,
)
def test_keys_and_values_of_four_bits_of_different_widths(sizes, arrays):
    """Products of both as they are held, of one, and of latents: values are columns of keys."""
    kinds = {"cache_dtype": "int4", "token_scales": True, "head_dim": sizes[0], "arrays": arrays}
    kinds |= {"value_dim": sizes[1], "latent": sizes == (128, 100)}
    problem = random_problem([1, 2], [9, 150], SPECS["plain"], dtype=BFLOAT16, **kinds)
    assert_attention_close(*run(problem, "numba"), problem)


@pytest.mark.parametrize("arrays", [(), ("bias",)])
@pytest.mark.parametrize("num_kv_heads", [8, 11, 16])
def test_per_token_scales_of_many_heads(num_kv_heads, arrays):
    """Eight heads are read at once, others one by one."""
    kinds = {"cache_dtype": "int8", "token_scales": True, "dtype": BFLOAT16, "arrays": arrays}
    heads = {"num_heads": 2 * num_kv_heads, "num_kv_heads": num_kv_heads}
    problem = random_problem([1, 2], [9, 150], SPECS["plain"], **heads, **kinds)
    problem = with_scales_apart(problem)
    assert_attention_close(*run(problem, "numba"), problem)


@pytest.mark.parametrize("cache_dtype", INTEGERS)
@given(power=st.integers(-100, 100))
def test_queries_of_any_magnitude(cache_dtype, power):
    """The same answer, where the scale of the logits makes up for it."""
    problem = of_integers(cache_dtype, lambda query: query * np.float32(2.0**power))
    scale = float(np.float32(64**-0.5 * 2.0**-power))
    problem = problem.replace(spec=AttentionSpec(scale=scale))
    assert_attention_close(*run(problem, "numba"), problem)


@pytest.mark.parametrize("cache_dtype", INTEGERS)
@pytest.mark.parametrize("number", [0.0, -0.0, np.nan, np.inf, -np.inf])
def test_numbers_that_have_no_exponent(cache_dtype, number):
    """Zeros give the mean; what is not finite makes its own rows NaN and changes no other bit."""

    def first_head(query):
        query[1, 0] = number
        return query

    plain, changed = of_integers(cache_dtype), of_integers(cache_dtype, first_head)
    (want, _), (out, lse) = run(plain, "numba"), run(changed, "numba")
    if number == 0:
        assert_attention_close(out, lse, changed)
    else:
        assert np.isnan(out[1, 0].astype(np.float32)).all()
        assert np.isnan(lse[1, 0])
    np.testing.assert_array_equal(out[1, 1:], want[1, 1:])
    np.testing.assert_array_equal(out[0], want[0])


@pytest.mark.parametrize("cache_dtype", INTEGERS)
@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_a_scale_of_values_that_is_not_finite_is_seen_in_out(cache_dtype, scale):
    problem = of_integers(cache_dtype)
    scales = problem.value_scale.copy()
    column, slot = divmod(70, problem.block_size)
    scales[problem.block_tables[1][column], slot, 0] = scale
    out, lse = run(problem.replace(value_scale=scales), "numba")
    assert not np.isfinite(out[1, :2].astype(np.float32)).all(-1).any()
    assert np.isfinite(out[1, 2:].astype(np.float32)).all()
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("spread", [0.0, 40.0])
@given(seed=st.integers(0, 99))
def test_weights_of_chunks_far_apart_in_size(spread, seed):
    """Many small weights behind a great one count, as do those of a chunk without a great one."""
    alibi = AttentionSpec(alibi_slopes=(spread / 700,) * 4)
    problem = random_problem([1], [700], alibi, dtype=BFLOAT16, cache_dtype="int8", seed=seed)
    assert_attention_close(*run(problem, "numba"), problem)


def test_the_least_integer_is_read_as_it_is():
    """-128, which no write makes."""
    problem = random_problem([1, 1], [9, 150], SPECS["plain"], dtype=BFLOAT16, cache_dtype="int8")
    key, value = (np.full_like(plane, -128) for plane in (problem.key_cache, problem.value_cache))
    problem = problem.replace(key_cache=key, value_cache=value)
    assert_attention_close(*run(problem, "numba"), problem)

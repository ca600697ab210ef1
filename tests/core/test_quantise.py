"""Caches in eight bits: what is written, what is refused, what goes along with the blocks."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import may_refuse
from hypothesis import example, given
from hypothesis import strategies as st

from pagedattn import (
    AttentionSpec,
    InvalidInputError,
    KVCache,
    copy_blocks,
    fill_blocks,
    init_kv_cache,
    init_latent_cache,
    make_batch,
    paged_attention,
    swap_blocks,
    write_kv,
)
from pagedattn._dispatch.registry import can_load
from pagedattn.cache.quantise import LARGEST, quantised
from pagedattn.testing import batch_of, random_problem
from pagedattn.testing.features import CACHE_DTYPES

torch = pytest.importorskip("torch")

from tensors import tensors

from pagedattn_torch import copy_blocks_, swap_blocks_, write_kv_

SPEC = AttentionSpec()
SCALES = {"one": np.float32(0.37), "each": np.float32([0.25, 3.0])}
ODD = [0.0, -0.0, 1e-9, 1e9, -1e9, np.inf, -np.inf, np.nan, 0.5, 1.5, 2.5, -0.5]


def rows_of(dtype=np.float32):
    """Keys of every size, ties and odd ones among them: `[6, 2, 64]`."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((6, 2, 64)) * 10.0 ** rng.integers(-6, 4, (6, 2, 64))
    rows[0, :, : len(ODD)] = ODD
    return rows.astype(dtype)


def held(rows, scale, cache_dtype):
    """What a cache should hold, by NumPy: nearest, ties to even, saturating, NaN of int8 0."""
    wide = rows.astype(np.float32) / np.float32(scale).reshape(-1, 1)
    wide = np.clip(wide, -LARGEST[cache_dtype], LARGEST[cache_dtype])
    if cache_dtype == "int8":
        wide = np.rint(np.nan_to_num(wide, nan=0.0))
    return wide.astype(cache_dtype)


def empty(cache_dtype, key_scale, value_scale):
    scales = {"key_scale": jnp.asarray(key_scale), "value_scale": jnp.asarray(value_scale)}
    return init_kv_cache(3, 4, 2, 64, cache_dtype, **scales)


def same(got, want):
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@pytest.mark.parametrize("way", ["eager", "jit", "torch"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_a_write_rounds_to_the_nearest_and_saturates(way, scale, cache_dtype, dtype):
    with np.errstate(over="ignore"):
        key = rows_of(dtype)
    cache, slots = empty(cache_dtype, SCALES[scale], 1.0), np.array([11, 0, -1, 5, 7, 1])
    if way == "torch":
        key_, cache = tensors((jnp.asarray(key), cache))
        written = write_kv_(cache, key_, key_, torch.from_numpy(slots))
        planes = [plane.float().cpu().numpy() for plane in (written.key, written.value)]
    else:
        write = jax.jit(write_kv) if way == "jit" else write_kv
        written = write(cache, jnp.asarray(key), jnp.asarray(key), slots)
        planes = [np.asarray(plane, np.float32) for plane in (written.key, written.value)]
    assert str(written.dtype).removeprefix("torch.") == cache_dtype
    for plane, factor in zip(planes, (SCALES[scale], 1.0), strict=True):
        flat = plane.reshape(12, 2, 64)
        same(flat[slots[slots >= 0]], held(key, factor, cache_dtype)[slots >= 0])
        assert not flat[[2, 3, 4, 6, 8, 9, 10]].any()


def beside_ties(cache_dtype, scale, rng):
    """Keys whose quotient by a scale lies up to three steps beside a tie: `[256, 2, 64]`."""
    held = np.arange(256).astype(np.uint8).view(np.dtype(cache_dtype)).astype(np.float64)
    held = np.unique(held[np.isfinite(held)])
    ties = rng.choice((held[1:] + held[:-1]) / 2, (256, 2, 64))
    near = (ties * scale.reshape(-1, 1)).astype(np.float32)
    return (near.view(np.int32) + rng.integers(-3, 4, near.shape, np.int32)).view(np.float32)


@pytest.mark.optimised
@pytest.mark.parametrize("way", ["eager", "jit", "torch"])
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@given(
    scale=st.lists(st.floats(2.0**-100, 2.0**100, width=32), min_size=1, max_size=2),
    seed=st.integers(0, 1 << 31),
)
@example(scale=[40.726246], seed=0)
@example(scale=[1.0], seed=0)
def test_a_write_divides_as_float32_does(way, cache_dtype, scale, seed):
    """XLA divides by a broadcast scale as by its reciprocal, and on GPUs approximately."""
    scale = np.float32(scale if len(scale) > 1 else scale[0])
    rows = beside_ties(cache_dtype, scale, np.random.default_rng(seed))
    arrays = jnp.asarray(rows), jnp.asarray(scale)
    if way == "torch":
        got = quantised(*tensors((arrays[0],)), getattr(torch, cache_dtype), *tensors(arrays[1:]))
        got = got.float().cpu().numpy()
    else:
        write = jax.jit(quantised, static_argnums=1) if way == "jit" else quantised
        got = write(arrays[0], jnp.dtype(cache_dtype), arrays[1])
    same(got, held(rows, scale, cache_dtype))


@pytest.mark.parametrize("way", ["eager", "jit", "torch"])
def test_a_write_of_a_quotient_beside_a_tie(way):
    """1201.4242 / 40.726246 is just below 29.5, and times the reciprocal just above."""
    cache = init_kv_cache(1, 1, 1, 1, "int8", scales="head", key_scale=40.726246)
    row, slots = jnp.full((1, 1, 1), 1201.4242), jnp.array([0])
    if way == "torch":
        cache, row, slots = tensors((cache, row, slots))
        write = write_kv_
    else:
        write = jax.jit(write_kv) if way == "jit" else write_kv
    assert write(cache, row, row, slots).key.ravel().tolist() == [29]


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_writes_are_in_place_under_donation(cache_dtype):
    """No copy of the cache, in memory of the program either: XLA may compute float8 wider."""
    if not can_load("numba") and may_refuse("sdpa", "cache_dtype"):
        pytest.skip("nothing is installed that sets rows of float8 in place")
    cache = init_kv_cache(4096, 16, 2, 64, cache_dtype, key_scale=0.5, value_scale=1.0)
    row, slots = jnp.ones((1, 2, 64)), jnp.array([3])
    write = jax.jit(write_kv, donate_argnums=0)
    program = write.lower(cache, row, row, slots).compile()
    assert program.memory_analysis().temp_size_in_bytes < 1 << 16
    before = cache.key.unsafe_buffer_pointer()
    assert write(cache, row, row, slots).key.unsafe_buffer_pointer() == before


KINDS = [{"dtype": dtype} for dtype in ("float8_e4m3fn", "float8_e5m2", "int4")]
KINDS += [{"dtype": dtype, "scales": "token"} for dtype in CACHE_DTYPES]
KINDS += [{"dtype": dtype, "key_scale": 0.5, "value_scale": 2.0} for dtype in CACHE_DTYPES]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: " ".join(map(str, kind.values())))
def test_no_gradient_flows_through_a_write(kind):
    """A cotangent has the cache's dtype: what float8 would keep of it is no gradient."""
    cache, batch = init_kv_cache(2, 4, 1, 64, **kind), make_batch([3], [0], [[1]], block_size=4)
    rows = jax.random.normal(jax.random.key(0), (3, 1, 64))

    def loss(rows):
        written = write_kv(cache, rows, rows, batch.slot_mapping)
        return 1e4 * (paged_attention(rows + 1, written, batch, backend="xla") ** 2).sum()

    def of_query(query):
        written = write_kv(cache, rows, rows, batch.slot_mapping)
        return 1e4 * (paged_attention(query + 1, written, batch, backend="xla") ** 2).sum()

    np.testing.assert_array_equal(jax.grad(loss)(rows), jax.grad(of_query)(rows))


def test_caches_of_the_same_scales_are_donated_one_by_one():
    """Each has scales of its own, and the caller keeps what it gave."""
    scale, row, slots = jnp.full(2, 0.5), jnp.ones((1, 2, 64)), jnp.array([3])
    layers = [empty("int8", scale, scale) for _ in range(2)]
    layers.append(init_latent_cache(3, 4, 64, 64, "int8", num_kv_heads=2, key_scale=scale))
    for cache in layers:
        value = None if cache.value is None else row
        written = jax.jit(write_kv, donate_argnums=0)(cache, row, value, slots)
        assert cache.key_scale.is_deleted()
        assert written.key[0, 3].tolist() == np.full((2, 64), 2).tolist()
    assert scale.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_blocks_are_copied_bit_for_bit_with_their_scales(cache_dtype):
    problem = random_problem([1], [9], SPEC, cache_dtype=cache_dtype, poison=None)
    planes = [jnp.asarray(plane) for plane in (problem.key_cache, problem.value_cache)]
    cache = KVCache(*planes, jnp.asarray(problem.key_scale), jnp.asarray(problem.value_scale))
    want = np.asarray(cache.key)
    copied = copy_blocks(cache, jnp.array([0, 1]), jnp.array([1, 2]))
    assert (np.asarray(copied.key)[[1, 2]] == want[[0, 1]]).all()
    assert copied.key_scale is cache.key_scale
    assert copied.value_scale is cache.value_scale
    other = tensors(cache)
    copy_blocks_(other, torch.tensor([0, 1]), torch.tensor([1, 2]))
    same(other.key.float().cpu(), copied.key)
    swapped = swap_blocks(cache, fill_blocks(cache, jnp.arange(3)), jnp.array([2]), jnp.array([0]))
    assert (np.asarray(swapped.key)[0] == want[2]).all()
    assert swapped.value_scale is cache.value_scale


@pytest.mark.usefixtures("on_cpu")  # on a GPU nothing waits to read scales
def test_caches_of_other_scales_do_not_swap():
    ids = jnp.array([0])
    others = empty("int8", 2.0, 1.0), empty("int8", [1.0, 1.0], 1.0)
    for other in (*others, init_kv_cache(3, 4, 2, 64, "int8", scales="head")):
        with pytest.raises(InvalidInputError, match="key_scale"):
            swap_blocks(empty("int8", 1.0, 1.0), other, ids, ids)
    here, there = (tensors(empty("int8", scale, 1.0)) for scale in (1.0, 2.0))
    with pytest.raises(InvalidInputError, match="key_scale"):
        swap_blocks_(here, there, torch.tensor([0]), torch.tensor([0]))


def test_filling_with_nan_and_zeros():
    cache = fill_blocks(init_kv_cache(2, 1, 1, 1, "float8_e4m3fn"), jnp.array([1]), np.nan)
    assert np.isnan(np.asarray(cache.key, np.float32)).ravel().tolist() == [False, True]
    cache = fill_blocks(
        init_kv_cache(2, 1, 1, 1, "int8", key_scale=0.5, value_scale=1), jnp.array([1]), 3
    )
    assert (cache.key.ravel().tolist(), cache.value.ravel().tolist()) == ([0, 6], [0, 3])


@pytest.mark.parametrize(
    ("scales", "word"),
    [
        ({"key_scale": 0.0}, "above 0"),
        ({"value_scale": jnp.array([1.0, -1.0])}, "above 0"),
        ({"key_scale": jnp.ones(3)}, "num_kv_heads"),
        ({"value_scale": jnp.ones((), jnp.int32)}, "floating"),
        ({"key_scale": jnp.nan}, "above 0"),
        ({"key_scale": "1"}, "array"),
    ],
)
def test_bad_scales(scales, word):
    with pytest.raises(InvalidInputError, match=word):
        init_kv_cache(3, 4, 2, 8, "int8", scales="head", **scales)


def test_other_bad_ones():
    with pytest.raises(InvalidInputError, match="key_scale is for a cache of float8_e4m3fn"):
        init_kv_cache(3, 4, 2, 8, jnp.float32, key_scale=1.0)
    with pytest.raises(InvalidInputError, match="int8"):
        init_kv_cache(3, 4, 2, 8, jnp.int16)
    problem = random_problem([1], [4], SPEC, poison=None)
    cache = init_kv_cache(5, 4, 2, 16, "int8", scales="head")
    with pytest.raises(InvalidInputError, match="16 bits or more"):
        paged_attention(jnp.zeros((1, 4, 16), jnp.int8), cache, batch_of(problem))
    with pytest.raises(InvalidInputError, match="16 bits or more"):
        write_kv(cache, *jnp.zeros((2, 1, 2, 16), jnp.float8_e5m2), jnp.array([0]))

"""Caches with per-token scales, and of int4: what is written, what goes along with the blocks."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pagedattn import (
    InvalidInputError,
    KVCache,
    copy_blocks,
    fill_blocks,
    init_kv_cache,
    init_latent_cache,
    swap_blocks,
    write_kv,
)
from pagedattn._dispatch.registry import can_load
from pagedattn.cache.packing import group_of
from pagedattn.cache.quantise import dequantised
from pagedattn.testing.oracle import factors, numbers

torch = pytest.importorskip("torch", minversion="2.9")  # older ones give no float8 by DLPack

from pagedattn_interop import to_jax
from tensors import tensors

import pagedattn_torch
from pagedattn_torch import copy_blocks_, swap_blocks_, write_kv_

LARGEST = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344, "int4": 7}
HEAD_DIMS = (64, 24)
ODD = (0.0, -0.0, 1e-45, 1e-38, -3e38, np.inf, -np.inf, np.nan, 1e-9, 7.0)


def kept(array):
    """The bits of an array, all NaN alike."""
    array = np.asarray(array)
    return np.where(np.isnan(array.astype(np.float32)), 0.125, array.astype(np.float32))


def same(got, want):
    np.testing.assert_array_equal(kept(got), kept(want))


def scales_of(rows, dtype):
    """The written rule, by NumPy."""
    size = group_of(rows.shape[-1]) if dtype == "int4" else rows.shape[-1]
    groups = np.abs(rows.astype(np.float32)).reshape(*rows.shape[:-1], -1, size)
    most = np.where(np.isfinite(groups), groups, 0).max(-1)
    held = np.float16 if dtype == "int4" else np.float32
    least, most_of_all = (2.0**-14, 65504) if dtype == "int4" else (2.0**-100, 1e38)
    scale = np.clip(most * np.float32(1 / LARGEST[dtype]), least, most_of_all)
    scale = np.where(most >= np.finfo(np.float32).tiny, scale, 1).astype(held)
    return scale if dtype == "int4" else scale[..., 0]


def held(rows, scale, dtype):
    """Rows divided by their scales, rounded; int4 as numbers."""
    groups = scale.reshape(*rows.shape[:2], -1)
    by_column = np.repeat(groups, rows.shape[2] // groups.shape[2], 2)
    with np.errstate(over="ignore"):
        wide = rows.astype(np.float32) / by_column.astype(np.float32)
    wide = np.clip(wide, -LARGEST[dtype], LARGEST[dtype])
    if dtype.startswith("int"):
        return np.rint(np.nan_to_num(wide, nan=0.0))
    return wide.astype(dtype).astype(np.float32)


def rows_of(seed, powers, head_dim, dtype=np.float32, odd=()):
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((6, 2, head_dim)) * 10.0 ** rng.integers(*powers, (6, 2, 1))
    rows[0, 0], rows[1, 1, : len(odd)] = 0, odd
    with np.errstate(over="ignore"):
        return rows.astype(dtype)


def written(way, cache, key, value, slots):
    if way == "torch":
        return to_jax(write_kv_(*tensors((cache, key, value)), torch.from_numpy(slots)), copy=True)
    return (jax.jit(write_kv) if way == "jit" else write_kv)(cache, key, value, slots)


SLOTS = np.array([11, 0, -1, 5, 7, 1])


@pytest.mark.parametrize("way", ["eager", "jit", "torch"])
@pytest.mark.parametrize("dtype", LARGEST)
@given(
    seed=st.integers(0, 1 << 31),
    powers=st.sampled_from([(0, 1), (-9, 6), (-37, -30), (30, 36)]),
    head_dim=st.sampled_from(HEAD_DIMS),
    rows_dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16, np.float16]),
    odd=st.lists(st.sampled_from(ODD), max_size=8),
)
@example(seed=0, powers=(-40, -36), head_dim=64, rows_dtype=np.float32, odd=ODD)
def test_a_write_computes_the_scales_and_rounds_by_them(
    way, dtype, seed, powers, head_dim, rows_dtype, odd
):
    key, value = (rows_of(seed + i, powers, head_dim, rows_dtype, odd) for i in (0, 1))
    cache = init_kv_cache(3, 4, 2, head_dim, dtype, scales="token")
    got = written(way, cache, jnp.asarray(key), jnp.asarray(value), SLOTS)
    for name, rows in (("key", key), ("value", value)):
        scale = np.asarray(getattr(got, f"{name}_scale"))
        scale = scale.reshape(12, *scale.shape[2:])
        want = scales_of(rows, dtype)
        same(scale[SLOTS[SLOTS >= 0]], want[SLOTS >= 0])
        assert (scale[[2, 3, 4, 6, 8, 9, 10]] == 1).all()
        plane = numbers(np.asarray(getattr(got, name))).reshape(12, 2, head_dim)
        same(plane[SLOTS[SLOTS >= 0]], held(rows, want, dtype)[SLOTS >= 0])
        assert not plane[[2, 3, 4, 6, 8, 9, 10]].any()


# Half a step of the scale; of floats half a spacing, at most 1/16 and 1/8 of the number, and no
# more than half of the least number, which is below a step.
STEPS = {"int8": (0.5, 0), "int4": (0.5, 0), "float8_e4m3fn": (2**-9, 1 / 16)}
STEPS["float8_e5m2"] = (2**-16, 1 / 8)


@pytest.mark.parametrize("dtype", LARGEST)
@given(seed=st.integers(0, 1 << 31), head_dim=st.sampled_from([64, 24, 96]))
def test_what_is_read_is_near_what_was_written(dtype, seed, head_dim):
    rows = rows_of(seed, (-3, 3), head_dim)
    cache = init_kv_cache(3, 4, 2, head_dim, dtype, scales="token")
    cache = write_kv(cache, jnp.asarray(rows), jnp.asarray(rows), SLOTS)
    got = dequantised(cache.value, cache.value_scale, jnp.float32).reshape(12, 2, head_dim)
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            scale = factors(np.asarray(cache.value_scale)[slot // 4, slot % 4], (2, head_dim))
            step, share = STEPS[dtype]
            room = np.maximum(step * scale, share * np.abs(rows[token])) * (1 + 1e-3) + 1e-30
            assert (np.abs(np.asarray(got)[slot] - rows[token]) <= room).all()


MAKERS = {
    "paged": (init_kv_cache, (3, 4, 2, 64)),
    "latent": (init_latent_cache, (3, 4, 64, 32)),
    "paged, torch": (pagedattn_torch.init_kv_cache, (3, 4, 2, 64)),
    "latent, torch": (pagedattn_torch.init_latent_cache, (3, 4, 64, 32)),
}
KEY, VALUE = {"key_scale": 0.02}, {"value_scale": 0.02}


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("given", [{}, KEY, VALUE, KEY | VALUE])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_new_cache_keeps_keys_and_values_below_one_or_is_refused(maker, given, dtype):
    """Unless scales of heads are asked for."""
    make, sizes = MAKERS[maker]
    if "latent" in maker:
        given = {name: scale for name, scale in given.items() if name == "key_scale"}
    try:
        cache = make(*sizes, dtype, **given)
    except InvalidInputError:
        assert given or dtype == "int8"
        return
    rows = jnp.asarray(0.5 * np.random.default_rng(0).standard_normal((6, cache.num_kv_heads, 64)))
    cache = write_kv(cache, rows, None if cache.value is None else rows, SLOTS)
    for plane, scale in zip(cache.planes, (cache.key_scale, cache.value_scale), strict=False):
        got = dequantised(plane, scale, jnp.float32).reshape(12, -1, 64)
        assert np.abs(np.asarray(got)[SLOTS] - rows)[SLOTS >= 0].max() < 0.25


def filled(dtype, head_dim=64, num_blocks=3, seed=0, latent=False):
    rows = jnp.asarray(rows_of(seed, (-2, 2), head_dim))
    if latent:
        cache = init_latent_cache(
            num_blocks, 4, head_dim, head_dim // 2, dtype, num_kv_heads=2, scales="token"
        )
        return write_kv(cache, rows, None, SLOTS)
    cache = init_kv_cache(num_blocks, 4, 2, head_dim, dtype, scales="token")
    return write_kv(cache, rows, rows[::-1], SLOTS)


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("dtype", LARGEST)
def test_scales_go_with_their_blocks(dtype, latent):
    cache = filled(dtype, latent=latent)
    assert set(cache.by_slot) >= {"key", "key_scale"}
    other = tensors(cache)
    copied = copy_blocks(cache, jnp.array([0, 1, -1]), jnp.array([1, 2, 0]))
    copy_blocks_(other, torch.tensor([0, 1, -1]), torch.tensor([1, 2, 0]))
    empty = filled(dtype, num_blocks=5, seed=1, latent=latent)
    swapped = swap_blocks(cache, empty, jnp.array([2]), jnp.array([4]))
    host = tensors(empty)
    swap_blocks_(tensors(cache), host, torch.tensor([2]), torch.tensor([4]))
    zeroed = fill_blocks(cache, jnp.array([0]))
    for name, array in cache.by_slot.items():
        before = np.asarray(array)
        after = np.asarray(copied.by_slot[name])
        same(after[[0, 1, 2]], before[[0, 0, 1]])
        same(to_jax(other).by_slot[name], after)
        same(np.asarray(swapped.by_slot[name])[4], before[2])
        same(np.asarray(swapped.by_slot[name])[:4], np.asarray(empty.by_slot[name])[:4])
        same(to_jax(host).by_slot[name], swapped.by_slot[name])
        assert (np.asarray(zeroed.by_slot[name])[0] == float("scale" in name)).all()
        same(np.asarray(zeroed.by_slot[name])[1:], before[1:])


@pytest.mark.parametrize("dtype", LARGEST)
def test_writes_are_in_place_under_donation(dtype):
    if not can_load("numba") and "float8" in dtype:
        pytest.skip("nothing is installed that sets rows of float8 in place")
    cache = init_kv_cache(4096, 16, 2, 64, dtype, scales="token")
    row, slots = jnp.ones((1, 2, 64)), jnp.array([3])
    write = jax.jit(write_kv, donate_argnums=0)
    program = write.lower(cache, row, row, slots).compile()
    assert program.memory_analysis().temp_size_in_bytes < 1 << 16
    before = {name: array.unsafe_buffer_pointer() for name, array in cache.by_slot.items()}
    after = write(cache, row, row, slots).by_slot
    assert {name: array.unsafe_buffer_pointer() for name, array in after.items()} == before
    assert len(before) == 4


def test_four_bits_take_half_the_bytes_of_eight():
    four, eight = (
        init_kv_cache(8, 16, 2, 128, dtype, scales="token") for dtype in ("int4", "int8")
    )
    assert four.key.nbytes * 2 == eight.key.nbytes
    assert (four.head_dim, str(four.dtype)) == (128, "int4")
    assert math.prod(four.key_scale.shape) * 32 == math.prod(eight.key.shape)
    by_hand = np.zeros((8, 16, 2, 64), np.uint8)
    cache = KVCache(by_hand, by_hand, four.key_scale, four.value_scale)
    rows = jnp.arange(-63.5, 64.5).reshape(1, 1, 128).repeat(2, 1)
    cache = write_kv(cache, rows, rows, jnp.array([0]))  # arrays of NumPy are planes too
    got = np.asarray(cache.key)[0, 0, 0].astype(int)
    low, high = got % 16, got // 16
    assert (low[0], low[31], high[31], high[63]) == (16 - 7, 16 - 4, 7, 7)


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("latent", [False, True])
def test_torch_makes_the_same_caches(dtype, latent):
    make, sizes = (
        ("init_latent_cache", (3, 4, 64, 32)) if latent else ("init_kv_cache", (3, 4, 2, 64))
    )
    here = getattr(pagedattn_torch, make)(*sizes, dtype, scales="token")
    there = getattr(__import__("pagedattn"), make)(*sizes, dtype, scales="token")
    assert str(here.dtype).removeprefix("torch.") == str(there.dtype) == dtype
    assert here.value_dim == there.value_dim
    for name, array in there.by_slot.items():
        assert to_jax(here).by_slot[name].dtype == array.dtype
        same(to_jax(here).by_slot[name], array)


@pytest.mark.parametrize("way", ["eager", "jit", "torch"])
def test_a_write_of_no_token(way):
    cache, rows = filled("int4"), jnp.ones((0, 2, 64))
    got = written(way, cache, rows, rows, np.zeros(0, int)).by_slot
    for name, array in cache.by_slot.items():
        same(got[name], array)


def test_gradients_stop_at_the_scales_of_a_write():
    cache, rows = init_kv_cache(1, 2, 1, 4, "int8", scales="token"), jnp.ones((1, 1, 4))

    def total(rows):
        return write_kv(cache, rows, rows, jnp.array([0])).key_scale.sum()

    assert not jax.grad(total)(rows).any()


MISTAKES = {
    "of what is not quantised": (lambda: init_kv_cache(1, 2, 1, 4, scales="token"), "scales must"),
    "of heads for int4": (lambda: init_kv_cache(1, 2, 1, 4, "int4", scales="head"), "int4 has"),
    "of another kind": (lambda: init_kv_cache(1, 2, 1, 4, "int8", scales="row"), "'row'"),
    "given": (
        lambda: init_kv_cache(1, 2, 1, 4, "int8", scales="token", key_scale=1.0),
        "write_kv computes",
    ),
    "none of int8": (lambda: init_kv_cache(1, 2, 1, 4, "int8"), "key_scale and value_scale: wit"),
    "one of int8": (lambda: init_kv_cache(1, 2, 1, 4, "int8", key_scale=1.0), 'scales="head" asks'),
    "none of latents": (lambda: init_latent_cache(1, 2, 4, 2, jnp.int8), "or key_scale: without"),
    "odd columns": (lambda: init_kv_cache(1, 2, 1, 5, "int4"), "must be even, got 5"),
    "odd values": (lambda: init_kv_cache(1, 2, 1, 4, "int4", value_dim=3), "must be even, got 3"),
    "int4 itself": (
        lambda: write_kv(
            KVCache(*jnp.zeros((2, 1, 2, 1, 4), jnp.int4)), *jnp.ones((2, 1, 1, 4)), jnp.array([0])
        ),
        "two numbers a byte",
    ),
    "none of int4": (
        lambda: fill_blocks(KVCache(*jnp.zeros((2, 1, 2, 1, 2), jnp.uint8)), jnp.array([0])),
        "key_scale must be float16",
    ),
    "of one plane": (
        lambda: fill_blocks(
            KVCache(*jnp.zeros((2, 1, 2, 1, 4), jnp.int8), jnp.ones((1, 2, 1))), jnp.array([0])
        ),
        "value_scale must be float32",
    ),
    "of other blocks": (
        lambda: fill_blocks(
            KVCache(*jnp.zeros((2, 1, 2, 1, 4), jnp.int8), *jnp.ones((2, 2, 2, 1))), jnp.array([0])
        ),
        r"float32\[1, 2, 1\]",
    ),
    "copied to others": (
        lambda: swap_blocks(
            init_kv_cache(1, 2, 1, 4, "int8", scales="token"),
            init_kv_cache(1, 2, 1, 4, "int8", key_scale=1.0, value_scale=1.0),
            *jnp.zeros((2, 1), int),
        ),
        "agree in key_scale",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_refused(mistake):
    call, text = MISTAKES[mistake]
    with pytest.raises(InvalidInputError, match=text):
        call()

"""The cache: writes, in-place updates proved by pointer, and copies of blocks."""

import os
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import as_numpy, random_cache, rows
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import KVCache, copy_blocks, init_kv_cache, swap_blocks, write_kv
from pagedattn.testing import reference_write

DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)
NUM_SLOTS = 36  # of random_cache()
CALLS = {"eager": write_kv, "jit": jax.jit(write_kv)}
IDS = {"max_size": 5, "unique": True}


def ids(bound: int) -> st.SearchStrategy:
    return st.lists(st.integers(0, bound - 1), **IDS)


def assert_holds(cache: KVCache, want) -> None:
    np.testing.assert_array_equal(as_numpy(cache)[0], want[0])
    np.testing.assert_array_equal(as_numpy(cache)[1], want[1])


def pointers(cache: KVCache) -> list[int]:
    return [half.unsafe_buffer_pointer() for half in (cache.key, cache.value)]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_init(dtype):
    cache = init_kv_cache(3, 4, 2, 8, dtype)
    assert (cache.num_blocks, cache.block_size, cache.num_kv_heads, cache.head_dim) == (3, 4, 2, 8)
    assert cache.dtype == cache.key.dtype == cache.value.dtype == dtype
    assert not np.asarray(cache.key).any()
    assert not np.asarray(cache.value).any()
    assert cache.key.unsafe_buffer_pointer() != cache.value.unsafe_buffer_pointer()


def test_default_dtype_is_bfloat16():
    assert init_kv_cache(1, 1, 1, 1).dtype == jnp.bfloat16


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", DTYPES)
@given(
    slots=st.lists(st.integers(0, NUM_SLOTS - 1), min_size=6, max_size=6, unique=True),
    dropped=st.sets(st.integers(0, 5)),
)
def test_write(call, dtype, slots, dropped):
    """Each token at its slot, slot -1 nowhere (not in the last slot), nothing else touched."""
    cache = random_cache(dtype=dtype)
    before = as_numpy(cache)
    slots = np.array([-1 if t in dropped else slot for t, slot in enumerate(slots)], np.int32)
    key, value = rows(6, cache)
    want = reference_write(*before, np.asarray(key), np.asarray(value), slots)
    assert_holds(CALLS[call](cache, key, value, jnp.asarray(slots)), want)
    assert_holds(cache, before)  # not donated, so untouched


def test_all_slots_minus_one_write_nothing():
    cache = random_cache()
    assert_holds(write_kv(cache, *rows(3, cache), jnp.full(3, -1, jnp.int32)), as_numpy(cache))


def test_dropped_rows_may_hold_nan():
    cache = random_cache()
    key, value = (x.at[1].set(jnp.nan) for x in rows(3, cache))
    out = write_kv(cache, key, value, jnp.array([4, -1, 6], jnp.int32))
    assert np.isfinite(as_numpy(out)).all()


@pytest.mark.parametrize("slot", [NUM_SLOTS, NUM_SLOTS + 7, -2, -NUM_SLOTS, 2**31 - 1, -(2**31)])
def test_slots_outside_the_cache_are_dropped_in_jit(slot):
    cache = random_cache()
    before = as_numpy(cache)
    key, value = rows(2, cache)
    out = jax.jit(write_kv)(cache, key, value, jnp.array([slot, 5], jnp.int32))
    assert_holds(out, reference_write(*before, np.asarray(key), np.asarray(value), [-1, 5]))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint32])
def test_slots_of_other_integer_dtypes(dtype):
    cache = random_cache()
    key, value = rows(2, cache)
    out = write_kv(cache, key, value, np.array([35, 0]).astype(dtype))
    want = reference_write(*as_numpy(cache), np.asarray(key), np.asarray(value), [35, 0])
    assert_holds(out, want)


def test_narrow_slots_do_not_overflow():
    """int8 holds the slots 0..127 of a cache of 1024; the drop of -1 must not wrap to a slot."""
    cache = random_cache(num_blocks=256)
    key, value = rows(2, cache)
    slots = jnp.array([-1, 100], jnp.int8)
    want = reference_write(*as_numpy(cache), np.asarray(key), np.asarray(value), [-1, 100])
    assert_holds(jax.jit(write_kv)(cache, key, value, slots), want)


def test_no_tokens():
    cache = random_cache()
    out = write_kv(cache, *rows(0, cache), jnp.zeros(0, jnp.int32))
    assert_holds(out, as_numpy(cache))


@pytest.mark.optimised
def test_in_place_under_donation():
    """The halves stay where they are, and the donated cache is gone."""
    cache = random_cache()
    want = reference_write(*as_numpy(cache), *(np.asarray(x) for x in rows(2, cache)), [3, 9])
    before = pointers(cache)
    step = jax.jit(write_kv, donate_argnums=0)
    out = step(cache, *rows(2, cache), jnp.array([3, 9], jnp.int32))
    assert pointers(out) == before
    assert cache.key.is_deleted()
    assert_holds(out, want)


@pytest.mark.optimised
def test_in_place_in_a_loop_of_steps():
    cache = random_cache()
    before = pointers(cache)
    key, value = rows(1, cache)

    def write_ten(cache):
        def body(i, cache):
            return write_kv(cache, key + i, value - i, jnp.full(1, 2 * i, jnp.int32))

        return jax.lax.fori_loop(0, 10, body, cache)

    out = jax.jit(write_ten, donate_argnums=0)(cache)
    assert pointers(out) == before
    np.testing.assert_array_equal(np.asarray(out.key).reshape(36, 2, 8)[18], key[0] + 9)


@pytest.mark.optimised
@pytest.mark.skipif(
    "optimization_level=0" in os.environ.get("XLA_FLAGS", ""), reason="XLA is told to be slow"
)
def test_writing_a_large_cache_in_place_costs_no_copy():
    """One token into 2 x 64 MiB (1 GiB on a GPU): far quicker than a write that must copy."""
    num_blocks = 4096 if jax.default_backend() == "cpu" else 65536  # a GPU copies 64 MiB at once
    cache = jax.jit(lambda: init_kv_cache(num_blocks, 16, 2, 128, jnp.float32))()
    slots = jnp.array([77], jnp.int32)
    new = rows(1, cache)
    copying, donating = jax.jit(write_kv), jax.jit(write_kv, donate_argnums=0)

    def seconds(call, cache):
        start = time.perf_counter()
        out = jax.block_until_ready(call(cache, *new, slots))
        return time.perf_counter() - start, out

    copies = [seconds(copying, cache)[0] for _ in range(4)][1:]
    moves = []
    for _ in range(40):  # one of them goes undisturbed
        spent, cache = seconds(donating, cache)
        moves.append(spent)
    assert min(moves[1:]) < min(copies) / 5


@pytest.mark.parametrize("jit", [False, True])
@given(pairs=st.lists(st.tuples(st.integers(-1, 8), st.integers(-1, 8)), max_size=6))
def test_copy_blocks_reads_before_it_writes(jit, pairs):
    """Overlapping ids, chains and exchanges: every source is read as it was; -1 copies nothing."""
    copied = {dst: src for src, dst in pairs if -1 not in (src, dst)}  # each destination once
    unused = [pair for pair in pairs if -1 in pair]
    src, dst = [*copied.values(), *(s for s, _ in unused)], [*copied, *(d for _, d in unused)]
    cache = random_cache()
    before = as_numpy(cache)
    want = [half.copy() for half in before]
    for half, old in zip(want, before, strict=True):
        for d, s in copied.items():
            half[d] = old[s]
    call = jax.jit(copy_blocks) if jit else copy_blocks
    got = call(cache, jnp.array(src, jnp.int32), jnp.array(dst, jnp.int32))
    assert_holds(got, want)
    assert_holds(cache, before)


def test_one_block_fans_out():
    cache = random_cache()
    out = copy_blocks(cache, jnp.array([2, 2, 2]), jnp.array([5, 7, 0]))
    for block in (5, 7, 0):
        np.testing.assert_array_equal(out.key[block], cache.key[2])
        np.testing.assert_array_equal(out.value[block], cache.value[2])


@pytest.mark.optimised
def test_copy_blocks_in_place_under_donation():
    cache = random_cache()
    before, old = pointers(cache), as_numpy(cache)
    step = jax.jit(copy_blocks, donate_argnums=0)
    out = step(cache, jnp.array([0, 1]), jnp.array([1, 2]))
    assert pointers(out) == before
    np.testing.assert_array_equal(out.key[2], old[0][1])


@pytest.mark.parametrize("call", [copy_blocks, jax.jit(copy_blocks)], ids=["eager", "jit"])
def test_block_minus_one_copies_nothing(call):
    """From or to it, so that lists of copies can be padded."""
    cache = random_cache()
    out = call(cache, jnp.array([-1, 2, -1, 4]), jnp.array([0, -1, -1, 5]))
    want = as_numpy(cache)
    for half in want:
        half[5] = half[4]
    assert_holds(out, want)


@pytest.mark.parametrize("bad", [9, 50, -1, 2**31 - 1])
def test_block_ids_outside_the_cache_copy_nothing_in_jit(bad):
    cache = random_cache()
    for src, dst in (([bad], [0]), ([0], [bad])):
        out = jax.jit(copy_blocks)(cache, jnp.array(src, jnp.int32), jnp.array(dst, jnp.int32))
        assert_holds(out, as_numpy(cache))


def test_swap_blocks_copies_between_pools():
    """It is a copy: the source keeps its blocks, the rest of the destination stays."""
    source, target = random_cache(9, seed=3), random_cache(5, seed=4)
    out = swap_blocks(source, target, jnp.array([8, 0]), jnp.array([1, 4]))
    for half, old, given_ in (
        (out.key, target.key, source.key),
        (out.value, target.value, source.value),
    ):
        np.testing.assert_array_equal(half[1], given_[8])
        np.testing.assert_array_equal(half[4], given_[0])
        np.testing.assert_array_equal(half[jnp.array([0, 2, 3])], old[jnp.array([0, 2, 3])])


@pytest.mark.optimised
def test_swap_blocks_in_place_under_donation():
    source, target = random_cache(9, seed=3), random_cache(5, seed=4)
    before = pointers(target)
    step = jax.jit(swap_blocks, donate_argnums=1)
    assert pointers(step(source, target, jnp.array([8]), jnp.array([1]))) == before


def test_swap_blocks_to_the_host_and_back():
    """Between the default device and the host; the result lies with the destination."""
    device, host = jax.devices()[0], jax.devices("cpu")[-1]
    pool = jax.device_put(random_cache(9, seed=3), device)
    spare = jax.device_put(random_cache(5, seed=4), host)
    out = swap_blocks(pool, spare, jnp.array([8]), jnp.array([1]))
    assert out.key.devices() == out.value.devices() == {host}
    np.testing.assert_array_equal(np.asarray(out.key[1]), np.asarray(pool.key[8]))
    back = swap_blocks(out, pool, jnp.array([1]), jnp.array([0]))
    assert back.key.devices() == {device}
    np.testing.assert_array_equal(np.asarray(back.value[0]), np.asarray(pool.value[8]))


def test_cache_is_a_pytree_of_two_arrays():
    cache = random_cache()
    leaves, tree = jax.tree.flatten(cache)
    assert [leaf is half for leaf, half in zip(leaves, (cache.key, cache.value), strict=True)]
    assert isinstance(tree.unflatten(leaves), KVCache)

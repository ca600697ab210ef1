"""Integers that int32 does not hold: an error outside jit, from whichever function and argument."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pagedattn as pa
from pagedattn._arrays.int32 import int32


def pool():
    empty = pa.init_block_pool(6, 2, max_seqs=3, max_blocks=3)
    return pa.append_tokens(empty, np.array([3, 0, 2]))[0]


def host():
    return pa.init_block_pool(4, 2, max_seqs=3, max_blocks=3)


def cache():
    return pa.init_kv_cache(4, 2, 1, 1, jnp.float32)


ROWS = np.ones((2, 1, 1), np.float32)
LENS = {"num_tokens": 4, "max_query_len": 2}
# Every function that takes integers, with good ones: the arguments before them, the integers.
CALLS = {
    "append_tokens": (lambda n: pa.append_tokens(pool(), n), {"num_tokens": [1, 1, 0]}),
    "fork": (lambda p, c: pa.fork(pool(), p, c), {"parents": [0], "children": [1]}),
    "share_blocks": (
        lambda s, b, n: pa.share_blocks(pool(), s, b, n),
        {"seq": 1, "blocks": [0, 1], "num_tokens": 4},
    ),
    "hold_blocks": (lambda b: pa.hold_blocks(pool(), b), {"blocks": [0, 1]}),
    "drop_blocks": (lambda b: pa.drop_blocks(pool(), b), {"blocks": [0, 1]}),
    "release": (lambda s: pa.release(pool(), s), {"seqs": [0, 1]}),
    "swap_out": (
        lambda s, h: pa.swap_out(pool(), host(), s, h),
        {"seqs": [0, 1], "host_seqs": [1, 2]},
    ),
    "swap_in": (
        lambda h, s: pa.swap_in(host(), pool(), h, s),
        {"host_seqs": [1], "seqs": [0]},
    ),
    "batch_from_pool": (
        lambda n: pa.batch_from_pool(pool(), n, **LENS),
        {"query_lens": [2, 0, 1]},
    ),
    "next_batch": (lambda n: pa.next_batch(pool(), n, **LENS), {"query_lens": [1, 0, 1]}),
    "next_batches": (lambda n: pa.next_batches([pool()], n, **LENS), {"query_lens": [1, 0, 1]}),
    "positions": (
        lambda q, n: pa.positions(q, n, 4),
        {"query_start_loc": [0, 2, 3], "seq_lens": [2, 8]},
    ),
    "slot_mapping": (
        lambda s, p: pa.slot_mapping(np.array([[5, 3]]), s, p, block_size=4),
        {"seq_ids": [0, 0], "positions": [1, 4]},
    ),
    "write_kv": (lambda s: pa.write_kv(cache(), ROWS, ROWS, s), {"slot_mapping": [1, 5]}),
    "copy_blocks": (lambda s, d: pa.copy_blocks(cache(), s, d), {"src": [1], "dst": [2]}),
    "fill_blocks": (lambda b: pa.fill_blocks(cache(), b), {"blocks": [1]}),
    "make_batch": (
        lambda q, c: pa.make_batch(q, c, [[0], [1, 2]], block_size=4),
        {"query_lens": [3, 1], "context_lens": [0, 5]},
    ),
    "make_batch of written tokens": (
        lambda q, k: pa.make_batch(q, None, [[0], [1, 2]], key_lens=k, block_size=4),
        {"query_lens": [3, 1], "key_lens": [3, 6]},
    ),
}
GRID = [(name, argument) for name, (_, arguments) in CALLS.items() for argument in arguments]
# The first two would be 1 and -1 in 32 bits, and both are fine in most places.
LARGE = (2**32 + 1, 2**33 - 1, 2**31, -(2**31) - 1)


@pytest.mark.parametrize("large", LARGE)
@pytest.mark.parametrize(("name", "argument"), GRID)
def test_what_int32_does_not_hold_is_refused(name, argument, large):
    function, arguments = CALLS[name]
    arrays = {key: np.array(value) for key, value in arguments.items()}
    function(*arrays.values())
    arrays[argument].flat[-1] = large
    with pytest.raises(pa.InvalidInputError, match=argument):
        function(*arrays.values())


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", ">i4", "int64", "uint64", ">i8"])
@pytest.mark.parametrize("name", CALLS)
def test_every_width_and_byte_order_counts_the_same(name, dtype):
    function, arguments = CALLS[name]
    want = function(*(np.array(value, np.int32) for value in arguments.values()))
    got = function(*(np.array(value, dtype) for value in arguments.values()))
    jax.tree.map(np.testing.assert_array_equal, got, want)


EDGES = [edge + step for edge in (0, 2**7, 2**31, 2**32, 2**63) for step in (-2, -1, 0, 1)]
WIDTHS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("way", ["NumPy", "JAX", "jit"])
@pytest.mark.parametrize("dtype", WIDTHS)
def test_what_does_not_fit_becomes_minus_one(dtype, way, x64):
    if way != "NumPy" and not x64:
        dtype = dtype.replace("64", "32")  # JAX has no wider ones
    bounds = np.iinfo(dtype)
    numbers = [n for edge in EDGES for n in (edge, -edge) if bounds.min <= n <= bounds.max]
    with jax.enable_x64(x64):
        values = np.array(numbers, dtype)
        values = values if way == "NumPy" else jnp.asarray(values)
        got = jax.jit(int32)(values) if way == "jit" else int32(values)
    assert got.dtype == np.int32
    assert got.tolist() == [n if -(2**31) <= n < 2**31 else -1 for n in numbers]


def test_slots_that_int32_does_not_hold():
    """Of blocks that it does hold: outside jit an error, inside none."""
    arguments = np.array([[2**30, 2**30 - 1]]), np.zeros(2, int), np.array([5, 9])
    with pytest.raises(pa.InvalidInputError, match="slots must fit int32"):
        pa.slot_mapping(*arguments, block_size=8)
    slots = jax.jit(pa.slot_mapping, static_argnames="block_size")
    arrays = [jnp.asarray(array, jnp.int32) for array in arguments]
    assert slots(*arrays, block_size=8).tolist() == [-1, -1]


def test_table_entries_that_are_not_used_may_be_of_any_size():
    table = np.array([[3, 2**40, -(2**50)]])
    slots = pa.slot_mapping(table, np.zeros(2, int), np.array([1, 2]), block_size=4)
    assert slots.tolist() == [13, 14]


def test_a_pool_whose_sequences_int32_cannot_count():
    with pytest.raises(pa.InvalidInputError, match="max_blocks"):
        pa.init_block_pool(2, 2**20, max_seqs=1, max_blocks=2**12)

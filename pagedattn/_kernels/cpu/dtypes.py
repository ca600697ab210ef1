"""The kinds of numbers that a cache holds: their sizes, and float32 made of them and back.

Numba hands a kind on as a type. Where NumPy lacks one, an integer stands for it.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from . import float16
from .simd import BYTE, FLOAT, LANES, PAIRS, along, as_bfloat16, at, load, store, word

BFLOAT16, E4M3, E5M2 = np.uint16, np.uint8, np.uint32
KINDS = {
    "bfloat16": BFLOAT16,
    "float16": np.float16,
    "float32": np.float32,
    "float8_e4m3fn": E4M3,
    "float8_e5m2": E5M2,
    "int8": np.int8,
}
# In memory.
TYPES = {
    types.uint16: ir.IntType(16),
    types.float16: ir.HalfType(),
    types.float32: FLOAT,
    types.uint8: BYTE,
    types.uint32: BYTE,
    types.int8: BYTE,
}
SIZES = {types.uint16: 2, types.float16: 2, types.float32: 4}  # in bytes; the others have one
# `widened` gives numbers of e4m3 without the last of their factors, which is left to the sums.
UNITS = {"float8_e4m3fn": 256.0}


def dtypes(kinds):
    """The kinds of the query and of the cache, of the pair of them that Numba hands on."""
    return [kind.dtype for kind in kinds]


def size_of(kind):
    """Bytes of a number."""
    return SIZES.get(kind, 1)


def widened(builder, numbers, kind):
    """A vector of numbers of the cache as float32, but for their factor in `UNITS`."""
    wide = ir.VectorType(FLOAT, numbers.type.count)
    if kind == types.float32:
        return numbers
    if kind == types.float16:
        return float16.widened(builder, numbers)
    if kind == types.int8:
        return builder.sitofp(numbers, wide)
    if kind == types.uint16:
        return _shifted(builder, numbers, ir.IntType(32), wide, 16)
    bits = ir.VectorType(ir.IntType(16), numbers.type.count)
    half = _e4m3 if kind == types.uint8 else _e5m2
    return float16.widened(builder, half(builder, numbers, bits))


def _shifted(builder, numbers, bits, wide, by):
    """Numbers that are the upper bits of wider ones."""
    bits = ir.VectorType(bits, numbers.type.count)
    return builder.bitcast(builder.shl(builder.zext(numbers, bits), _all(bits, by)), wide)


def _e5m2(builder, numbers, bits):
    """float8_e5m2 is the upper byte of float16."""
    return _shifted(builder, numbers, bits.element, ir.VectorType(ir.HalfType(), bits.count), 8)


def _e4m3(builder, numbers, bits):
    """float16 of a 256th of float8_e4m3fn: the exponent counts from 7 there, from 15 here.

    Its NaN has all bits of exponent and mantissa set. One more in the last of them carries into the
    bit above the exponent, which makes it a NaN of float16; no other number carries.
    """
    placed = builder.shl(builder.sext(numbers, bits), _all(bits, 7))
    placed = builder.and_(placed, _all(bits, 0xBF80))
    carry = builder.and_(builder.add(placed, _all(bits, 0x80)), _all(bits, 0x4000))
    return builder.bitcast(builder.or_(placed, carry), ir.VectorType(ir.HalfType(), bits.count))


def _all(kind, number):
    return ir.Constant(kind, [number] * kind.count)


def narrowed(builder, numbers, kind):
    """A vector of float32 as numbers of a floating kind, rounded to even."""
    if kind == types.uint16:
        return (as_bfloat16 if PAIRS else _bfloat16)(builder, numbers)
    if kind == types.float16:
        return float16.narrowed(builder, numbers)
    return numbers


def _bfloat16(builder, numbers):
    bits, half = (ir.VectorType(ir.IntType(size), numbers.type.count) for size in (32, 16))
    given = builder.bitcast(numbers, bits)
    upper = builder.lshr(given, _all(bits, 16))
    up = builder.add(builder.and_(upper, _all(bits, 1)), _all(bits, 0x7FFF))
    rounded = builder.lshr(builder.add(given, up), _all(bits, 16))
    quiet = builder.or_(upper, _all(bits, 0x40))  # NaN: rounding could turn it into infinity
    is_nan = builder.fcmp_unordered("uno", numbers, numbers)
    return builder.trunc(builder.select(is_nan, quiet, rounded), half)


def row_vector(builder, row, index, kind, count=LANES):
    """Numbers of a row of the cache from `index` on, as they are."""
    size = size_of(kind)
    numbers = ir.VectorType(TYPES[kind], count)
    return load(builder, at(builder, row, builder.mul(index, word(size)), numbers), size)


def row_end(builder, row, index, end, kind, count=LANES):
    """The last numbers of a row, and zeros: nothing past the row is read."""
    numbers, size = ir.VectorType(TYPES[kind], count), word(size_of(kind))
    room = cgutils.alloca_once(builder, numbers)
    builder.store(ir.Constant(numbers, None), room)
    source = at(builder, row, builder.mul(index, size), BYTE)
    left = builder.mul(builder.sub(end, index), size)
    cgutils.raw_memcpy(builder, room, source, left, 1)
    return builder.load(room)


def put_vector(builder, row, index, numbers, kind):
    """Writes numbers to a row from `index` on."""
    size = size_of(kind)
    place = at(builder, row, builder.mul(index, word(size)), numbers.type)
    store(builder, numbers, place, size)


def put_end(builder, row, index, end, numbers, kind):
    """Writes the last numbers of a row, and nothing past it."""
    size = word(size_of(kind))
    room = cgutils.alloca_once_value(builder, numbers)
    target = at(builder, row, builder.mul(index, size), BYTE)
    cgutils.raw_memcpy(builder, target, room, builder.mul(builder.sub(end, index), size), 1)


def each(builder, kind, dim, counts, body):
    """`body(index, take)` along a row, where `take(row)` gives numbers from there on.

    They are as many as the first count says as long as there are, then the next; at the end zeros
    make up for what is missing.
    """

    def whole(count):
        return lambda index: body(index, lambda row: row_vector(builder, row, index, kind, count))

    stop = word(0)
    for count in counts:
        stop = along(builder, count, stop, dim, whole(count))
    with builder.if_then(builder.icmp_signed("<", stop, dim), likely=False):
        body(stop, lambda row: row_end(builder, row, stop, dim, kind, counts[-1]))

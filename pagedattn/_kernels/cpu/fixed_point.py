"""Rows of queries as 16-bit integers times a power of two, to multiply keys of integers by.

A CPU adds up products of such integers at least as fast as those of bfloat16, and eight or four
bits widen to them without a table. The greatest number of a row has 15 bits. Numbers of bfloat16
from a 128th of it up are exact, but that `nibble_dot` lowers 32640 to 32639; smaller ones are off
by at most 2**-15 of the greatest, which is more than bfloat16's own spacing for those below a
256th. So weights are no such rows: those of an attention sink, whose values are next to nothing,
are thousands of times all others. A row with NaN or infinity has the factor NaN.
"""

from llvmlite import ir
from numba.core import cgutils

from .dtypes import BFLOAT16, INT4, INT8
from .simd import (
    F32,
    HAS_INT16_MADD,
    I16,
    I32,
    I32_VECTOR,
    LANES,
    VECTOR,
    along,
    at,
    i64,
    load,
    spread,
    store,
)
from .store_row import folded

COUNT = 2 * LANES  # of 16 bits in a vector
# Bits of float32.
EXPONENT = 0x7F800000  # all set in NaN and infinity
LEAST = (127 - 112) << 23  # 2**-112: its factor, 2**-126, is the least normal float32
MULTIPLIER = (127 + 14 + 127) << 23  # less those of 2**n, the bits of 2**(14 - n)
UNIT = 14 << 23  # less this, those of 2**n are the bits of 2**(n - 14)
NAN = 0x7FC00000
MOST = 32767.0
ROUNDING = 1.5 * 2.0**23  # a sum with it has the nearest integer in its lowest bits


def are_int16(query_dtype, dtype) -> bool:
    """Whether queries and a cache of these dtypes are multiplied as 16-bit integers."""
    return HAS_INT16_MADD and query_dtype == BFLOAT16 and dtype in (INT8, INT4)


def as_int16(builder, numbers):
    """Integers of eight bits as ones of sixteen."""
    return builder.sext(numbers, ir.VectorType(I16, numbers.type.count))


def whole_vectors(builder, dim):
    """The least multiple of COUNT that is not below a number of columns."""
    up = builder.add(dim, i64(COUNT - 1))
    return builder.and_(up, i64(-COUNT))


def set_int16(builder, row, count, most=MOST):
    """Turns `count` float32, a multiple of COUNT, into integers, and the last into their factor."""
    greatest = _greatest_exponent(builder, row, count)
    multiplier = builder.bitcast(builder.sub(I32(MULTIPLIER), greatest), F32)
    multiplier, rounding, most = (
        spread(builder, number) for number in (multiplier, F32(ROUNDING), F32(most))
    )

    def narrow(index):
        numbers = builder.fmul(_floats(builder, row, index), multiplier)
        below = builder.fcmp_ordered("<", numbers, most)
        numbers = builder.fadd(builder.select(below, numbers, most), rounding)
        words = ir.VectorType(I16, LANES)
        words = builder.trunc(builder.bitcast(numbers, I32_VECTOR), words)
        store(builder, words, at(builder, row, builder.mul(index, i64(2)), words.type), 2)

    along(builder, LANES, i64(0), count, narrow)
    finite = builder.icmp_unsigned("<", greatest, I32(EXPONENT))
    factor = builder.select(finite, builder.sub(greatest, I32(UNIT)), I32(NAN))
    builder.store(builder.bitcast(factor, F32), _factor(builder, row, count))


def factor_of(builder, row, count):
    """What integers that `set_int16` made stand for multiples of."""
    return builder.load(_factor(builder, row, count))


def _factor(builder, row, count):
    return at(builder, row, builder.mul(builder.sub(count, i64(1)), i64(4)), F32)


def _floats(builder, row, index):
    return load(builder, at(builder, row, builder.mul(index, i64(4)), VECTOR), 4)


def _greatest_exponent(builder, row, count):
    """The bits of the greatest power of two in any number of a row, LEAST or more."""
    top = cgutils.alloca_once_value(builder, ir.Constant(I32_VECTOR, [LEAST] * LANES))

    def take(index):
        bits = builder.bitcast(_floats(builder, row, index), I32_VECTOR)
        bits = builder.and_(bits, ir.Constant(I32_VECTOR, [EXPONENT] * LANES))
        builder.store(_greater(builder, bits, builder.load(top)), top)

    along(builder, LANES, i64(0), count, take)
    return folded(builder, builder.load(top), _greater)


def _greater(builder, a, b):
    return builder.select(builder.icmp_signed(">", a, b), a, b)

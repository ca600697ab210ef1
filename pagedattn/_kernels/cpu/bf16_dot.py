"""Numbers of a cache as bfloat16, of which the CPU multiplies pairs at once.

Those of eight bits are looked up, by their sizes without the sign: the lower bytes of bfloat16 in
one table of 128 bytes in registers, the upper ones in another.
"""

import ml_dtypes
import numpy as np
from llvmlite import ir

from . import rates
from .dtypes import BFLOAT16, EIGHT_BITS, INT8, UNITS
from .simd import HAS_BF16_DOT, HAS_BYTE_LOOK_UPS, I8, I16, LANES, LINE, looked_up, picks

COUNT = 2 * LANES  # bfloat16 in a vector
SIGN = 0x80
UPPER_OF_LEAST = 0xC3  # the upper byte of -128; the lower one is 0


def can_be_pairs(query_dtype, dtype):
    """Whether numbers of these dtypes, of queries and a cache, are exact as pairs of bfloat16."""
    if query_dtype != BFLOAT16:
        return False
    return HAS_BF16_DOT if dtype == BFLOAT16 else HAS_BYTE_LOOK_UPS and dtype in EIGHT_BITS


def are_pairs(query_dtype, dtype):
    """Whether short queries multiply numbers of these dtypes as such: faster than as float32."""
    return can_be_pairs(query_dtype, dtype) and rates.pairs_are_faster()


def counts(dtype):
    """How many numbers of a cache's row are best made bfloat16 at a time, and at least."""
    return (LINE, COUNT) if dtype in EIGHT_BITS else (COUNT,)


def as_pairs(builder, numbers, dtype):
    """Vectors of bfloat16, in order, of COUNT or LINE numbers of a dtype."""
    if dtype == BFLOAT16:
        return [numbers]
    given = numbers.type.count
    if given < LINE:
        numbers = builder.shuffle_vector(numbers, numbers, picks([*range(given)] * 2))
    sizes = _sizes(builder, numbers) if dtype == INT8 else numbers
    lower, upper = (looked_up(builder, table, sizes) for table in _tables(dtype.name))
    upper = builder.or_(upper, builder.and_(numbers, _all(SIGN)))
    if dtype == INT8:
        is_least = builder.icmp_signed("==", numbers, _all(SIGN))
        upper = builder.select(is_least, _all(UPPER_OF_LEAST), upper)
    vectors = []
    for start in range(0, given, COUNT):
        lanes = [lane + half for lane in range(start, start + COUNT) for half in (0, LINE)]
        mixed = builder.shuffle_vector(lower, upper, picks(lanes))
        vectors.append(builder.bitcast(mixed, ir.VectorType(I16, COUNT)))
    return vectors


def _sizes(builder, numbers):
    """Those of int8 without the sign; -128 has none in seven bits, and is looked up as 0."""
    negative = builder.icmp_signed("<", numbers, _all(0))
    return builder.select(negative, builder.sub(_all(0), numbers), numbers)


def _tables(name):
    """The lower and the upper bytes of bfloat16 of the 128 numbers whose sign bit is not set."""
    held = np.arange(SIGN, dtype=np.uint8).view(getattr(ml_dtypes, name, name))
    exact = (held.astype(np.float32) / UNITS.get(name, 1.0)).astype(ml_dtypes.bfloat16)
    return exact.view(np.uint8).reshape(SIGN, 2).T.tolist()


def _all(byte):
    return ir.Constant(ir.VectorType(I8, LINE), [byte] * LINE)

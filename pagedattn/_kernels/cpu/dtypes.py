"""The dtypes of queries and caches: their sizes, and float32 made of their numbers and back.

Compiled functions are handed a pair of `Dtype` on, that of the query and that of the cache: Numba
sees a type for each, so it compiles a kernel for each pair.
"""

from dataclasses import dataclass

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, register_model, typeof_impl

from . import float16
from .simd import (
    F16,
    F32,
    HAS_BF16_DOT,
    I8,
    I16,
    I32,
    LANES,
    along,
    as_bfloat16,
    at,
    i64,
    load,
    store,
)

# In memory; dtypes of eight bits are bytes.
TYPES = {
    **dict.fromkeys(("bfloat16", "int16"), I16),
    "float16": F16,
    "float32": F32,
}
SIZES = {"bfloat16": 2, "float16": 2, "int16": 2, "float32": 4}


@dataclass(frozen=True)
class Dtype:
    """A dtype of the query or the cache; NumPy itself lacks most of them."""

    name: str

    @property
    def memory(self) -> ir.Type:
        """The type of a number in memory."""
        return TYPES.get(self.name, I8)

    @property
    def size(self) -> int:
        """Bytes of a number."""
        return SIZES.get(self.name, 1)


class DtypeType(types.Dummy):
    """What Numba sees of a `Dtype`: no value, only which one it is."""

    def __init__(self, dtype: Dtype) -> None:
        self.dtype = dtype
        super().__init__(name=f"{type(self).__name__}({dtype.name})")


register_model(DtypeType)(models.OpaqueModel)
typeof_impl.register(Dtype)(lambda dtype, context: DtypeType(dtype))

BFLOAT16, FLOAT16, FLOAT32 = map(Dtype, ("bfloat16", "float16", "float32"))
E4M3, E5M2, INT8 = map(Dtype, ("float8_e4m3fn", "float8_e5m2", "int8"))
INT4 = Dtype("int4")  # two in a byte
INT16 = Dtype("int16")  # rows as `fixed_point` makes them
TOKENS = Dtype("token_scales")  # stands behind a pair of dtypes, where the cache has them
DTYPES = {
    dtype.name: dtype for dtype in (BFLOAT16, FLOAT16, FLOAT32, E4M3, E5M2, INT8, INT4, TOKENS)
}
EIGHT_BITS = E4M3, E5M2, INT8
# `widened` gives numbers of e4m3 without the last of their factors, which is left to the sums.
UNITS = {"float8_e4m3fn": 256.0}


def pair_of(dtypes) -> list[Dtype]:
    """The dtypes of the query and of the cache, of the type of the pair that Numba hands on."""
    return [marker.dtype for marker in dtypes]


def widened_counts(dtype):
    """How many numbers are best widened at a time, and at least."""
    # float16 takes half of the registers of AVX2 that float32 does. e4m3 takes several instructions
    # to become it, e5m2 is its upper byte.
    return (2 * LANES, LANES) if dtype == E4M3 and LANES == 8 else (LANES,)


def widened(builder, numbers, dtype):
    """A vector of numbers of the cache as float32, but for their factor in `UNITS`."""
    wide = ir.VectorType(F32, numbers.type.count)
    if dtype == FLOAT32:
        return numbers
    if dtype == FLOAT16:
        return float16.widened(builder, numbers)
    if dtype == INT8:
        return builder.sitofp(numbers, wide)
    if dtype == BFLOAT16:
        return _shifted(builder, numbers, I32, wide, 16)
    bits = ir.VectorType(I16, numbers.type.count)
    half = _e4m3 if dtype == E4M3 else _e5m2
    return float16.widened(builder, half(builder, numbers, bits))


def _shifted(builder, numbers, bits, wide, by):
    """Numbers that are the upper bits of wider ones."""
    bits = ir.VectorType(bits, numbers.type.count)
    return builder.bitcast(builder.shl(builder.zext(numbers, bits), _all(bits, by)), wide)


def _e5m2(builder, numbers, bits):
    """float8_e5m2 is the upper byte of float16."""
    return _shifted(builder, numbers, bits.element, ir.VectorType(F16, bits.count), 8)


def _e4m3(builder, numbers, bits):
    """float16 of a 256th of float8_e4m3fn: the exponent counts from 7 there, from 15 here.

    Its NaN has all bits of exponent and mantissa set. One more in the last of them carries into the
    bit above the exponent, which makes it a NaN of float16; no other number carries.
    """
    placed = builder.shl(builder.sext(numbers, bits), _all(bits, 7))
    placed = builder.and_(placed, _all(bits, 0xBF80))
    carry = builder.and_(builder.add(placed, _all(bits, 0x80)), _all(bits, 0x4000))
    return builder.bitcast(builder.or_(placed, carry), ir.VectorType(F16, bits.count))


def _all(vector, number):
    return ir.Constant(vector, [number] * vector.count)


def narrowed(builder, numbers, dtype):
    """A vector of float32 as numbers of a floating dtype, rounded to even."""
    if dtype == BFLOAT16:
        return (as_bfloat16 if HAS_BF16_DOT else _bfloat16)(builder, numbers)
    if dtype == FLOAT16:
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


def row_vector(builder, row, index, dtype, count=LANES):
    """Numbers of a row of the cache from `index` on, as they are."""
    size = dtype.size
    numbers = ir.VectorType(dtype.memory, count)
    return load(builder, at(builder, row, builder.mul(index, i64(size)), numbers), size)


def row_end(builder, row, index, end, dtype, count=LANES):
    """The last numbers of a row, and zeros: nothing past the row is read."""
    numbers, size = ir.VectorType(dtype.memory, count), i64(dtype.size)
    room = cgutils.alloca_once(builder, numbers)
    builder.store(ir.Constant(numbers, None), room)
    source = at(builder, row, builder.mul(index, size), I8)
    left = builder.mul(builder.sub(end, index), size)
    cgutils.raw_memcpy(builder, room, source, left, 1)
    return builder.load(room)


def put_vector(builder, row, index, numbers, dtype):
    """Writes numbers to a row from `index` on."""
    size = dtype.size
    place = at(builder, row, builder.mul(index, i64(size)), numbers.type)
    store(builder, numbers, place, size)


def put_end(builder, row, index, end, numbers, dtype):
    """Writes the last numbers of a row, and nothing past it."""
    size = i64(dtype.size)
    room = cgutils.alloca_once_value(builder, numbers)
    target = at(builder, row, builder.mul(index, size), I8)
    cgutils.raw_memcpy(builder, target, room, builder.mul(builder.sub(end, index), size), 1)


def each(builder, dtype, dim, counts, body):
    """`body(index, take)` along a row, where `take(row)` gives numbers from there on.

    They are as many as the first count says as long as there are, then the next; at the end zeros
    make up for what is missing.
    """

    def whole(count):
        return lambda index: body(index, lambda row: row_vector(builder, row, index, dtype, count))

    stop = i64(0)
    for count in counts:
        stop = along(builder, count, stop, dim, whole(count))
    with builder.if_then(builder.icmp_signed("<", stop, dim), likely=False):
        body(stop, lambda row: row_end(builder, row, stop, dim, dtype, counts[-1]))

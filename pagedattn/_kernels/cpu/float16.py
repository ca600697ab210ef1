"""Vectors of float16 as float32 and back, by integers where the CPU has no instructions for it.

LLVM would call functions of the compiler's library there, which no Python process has.
"""

from llvmlite import ir

from .simd import F16, F32, HAS_FLOAT16, I16, I32

SIGN = 0x8000
LEAST_NORMAL, TOO_LARGE, INFINITE = 0x38800000, 0x47800000, 0x7F800000  # 2**-14, 65536, in float32


def widened(builder, numbers):
    """float32 of float16."""
    count = numbers.type.count
    if HAS_FLOAT16:
        return builder.fpext(numbers, ir.VectorType(F32, count))
    words, floats = ir.VectorType(I32, count), ir.VectorType(F32, count)
    given = builder.zext(builder.bitcast(numbers, ir.VectorType(I16, count)), words)
    size = builder.and_(given, _all(words, SIGN - 1))
    shifted = builder.shl(size, _all(words, 13))
    # The exponent counts from 15 there and from 127 here. No float32 is subnormal on the way: XLA's
    # threads take those for 0.
    placed = builder.add(shifted, _all(words, LEAST_NORMAL - (1 << 23)))
    small = builder.fmul(builder.uitofp(size, floats), _all(floats, 2.0**-24))
    is_small = builder.icmp_unsigned("<", size, _all(words, 1 << 10))
    placed = builder.select(is_small, builder.bitcast(small, words), placed)
    endless = builder.icmp_unsigned(">=", size, _all(words, 0x7C00))
    placed = builder.select(endless, builder.or_(shifted, _all(words, INFINITE)), placed)
    sign = builder.shl(builder.and_(given, _all(words, SIGN)), _all(words, 16))
    return builder.bitcast(builder.or_(placed, sign), floats)


def narrowed(builder, numbers):
    """float16 of float32, rounded to even."""
    count = numbers.type.count
    if HAS_FLOAT16:
        return builder.fptrunc(numbers, ir.VectorType(F16, count))
    words = ir.VectorType(I32, count)
    given = builder.bitcast(numbers, words)
    size = builder.and_(given, _all(words, INFINITE | 0x7FFFFF))
    is_nan = builder.icmp_unsigned(">", size, _all(words, INFINITE))
    large = builder.select(is_nan, _all(words, 0x7E00), _all(words, 0x7C00))
    is_normal = builder.icmp_unsigned(">=", size, _all(words, LEAST_NORMAL))
    made = builder.select(is_normal, _normal(builder, size), _subnormal(builder, size))
    is_large = builder.icmp_unsigned(">=", size, _all(words, TOO_LARGE))
    made = builder.select(is_large, large, made)
    sign = builder.and_(builder.lshr(given, _all(words, 16)), _all(words, SIGN))
    short = builder.trunc(builder.or_(made, sign), ir.VectorType(I16, count))
    return builder.bitcast(short, ir.VectorType(F16, count))


def _normal(builder, size):
    """Half of the last place added, less one bit where it is even; a carry grows the exponent."""
    words = size.type
    odd = builder.and_(builder.lshr(size, _all(words, 13)), _all(words, 1))
    size = builder.sub(size, _all(words, LEAST_NORMAL - (1 << 23) - 0xFFF))
    return builder.lshr(builder.add(size, odd), _all(words, 13))


def _subnormal(builder, size):
    """The sum with 0.5, whose last place is that of subnormals, rounds as it should."""
    words = size.type
    floats = ir.VectorType(F32, words.count)
    total = builder.fadd(builder.bitcast(size, floats), _all(floats, 0.5))
    return builder.sub(builder.bitcast(total, words), _all(words, 0x3F000000))


def _all(kind, number):
    return ir.Constant(kind, [number] * kind.count)

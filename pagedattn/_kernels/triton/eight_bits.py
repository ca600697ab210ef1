"""Keys and values of eight bits, made float16 in registers.

Triton would go by way of bfloat16, in four conversions, and read values a byte at a time, since no
instruction transposes bytes. So queries become float16, which holds every value of the caches, and
values are read as pairs of columns, which are transposed like 16-bit ones and then taken apart.
"""

from typing import Any

import triton
import triton.language as tl
from triton import knobs

# The interpreter knows no assembly.
INTERPRETED = tl.constexpr(knobs.runtime.interpret)


def from_int8(low: str, high: str) -> Any:
    """Assembly: four int8 of one register as two registers of two float16 each.

    0x6400 + n is the float16 1024 + n; the sign bit turned makes n of an int8 positive. `low` and
    `high` are the bytes of n, and above each the byte 0x64, that make up the two results.
    """
    return tl.constexpr(f"""{{
        .reg .b32 n, low, high, zero;
        mov.b32 zero, 0x64806480;
        xor.b32 n, $2, 0x80808080;
        prmt.b32 low, n, 0x64646464, {low};
        prmt.b32 high, n, 0x64646464, {high};
        sub.f16x2 $0, low, zero;
        sub.f16x2 $1, high, zero;
        }}""")


NEIGHBOURS_OF_INT8 = from_int8("0x4140", "0x4342")  # bytes 0 and 1; bytes 2 and 3
EVEN_AND_ODD_OF_INT8 = from_int8("0x4240", "0x4341")  # bytes 0 and 2; bytes 1 and 3


@triton.jit
def factors_of(q, q_rest):
    """What each row's products are to be multiplied by, where queries are `halved`: powers of 2."""
    return power_below(tl.maximum(sizes_of(q), sizes_of(q_rest)))


@triton.jit
def power_below(size):
    """The power of 2 below a positive size, from 2**-126 to 2**126."""
    exponent = size.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.minimum(tl.maximum(exponent, 1 << 23), 253 << 23).to(tl.float32, bitcast=True)


@triton.jit
def sizes_of(q):
    wide = q.to(tl.float32)
    return tl.max(tl.where(wide == wide, tl.abs(wide), 0.0), 1)  # of NaN, nothing


@triton.jit
def halved(q, factors):
    """Queries as float16."""
    return (q.to(tl.float32) / factors[:, None]).to(tl.float16)


@triton.jit
def widened(bytes, DTYPE: tl.constexpr):
    """uint8 that hold numbers of DTYPE, as float16."""
    if tl.float8e4nv == DTYPE or INTERPRETED:
        return bytes.to(DTYPE, bitcast=True).to(tl.float16)
    if tl.float8e5 == DTYPE:
        # The upper byte of a float16 is a float8_e5m2.
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;",
            "=r,=r,r", [bytes], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        NEIGHBOURS_OF_INT8, "=r,=r,r", [bytes], dtype=tl.float16, is_pure=True, pack=4
    )


@triton.jit
def taken_apart(pairs, DTYPE: tl.constexpr):
    """The even and the odd columns, as float16, of numbers of DTYPE of which a uint16 holds two."""
    if INTERPRETED:
        even, odd = (pairs & 255).to(tl.uint8), (pairs >> 8).to(tl.uint8)
        even = even.to(DTYPE, bitcast=True).to(tl.float16)
        odd = odd.to(DTYPE, bitcast=True).to(tl.float16)
    elif tl.float8e4nv == DTYPE:
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 apart;
            .reg .b16 low, high;
            prmt.b32 apart, $2, 0, 0x3120;
            mov.b32 {low, high}, apart;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif tl.float8e5 == DTYPE:
        even, odd = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x2404; and.b32 $1, $2, 0xff00ff00;",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        even, odd = tl.inline_asm_elementwise(
            EVEN_AND_ODD_OF_INT8,
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return even, odd


@triton.jit
def octets(plane):
    """A plane of eight-bit numbers, seen as bytes."""
    return plane.to(tl.pointer_type(tl.uint8))


@triton.jit
def in_pairs(plane):
    """A plane of eight-bit numbers, seen as pairs of columns."""
    return plane.to(tl.pointer_type(tl.uint16))

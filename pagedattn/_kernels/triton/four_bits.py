"""Keys and values of four bits, made float16 in registers, times an eighth of their scales.

A byte holds a column of the first half of a row in its low four bits, and one of the second half in
its high ones, in two's complement. With the sign bit turned, n is a number from 0 to 15; 0x6400 + n
is the float16 1024 + n, and 0x6400 + 16 n is 1024 + 16 n. An eighth, since 7 times the largest
scale is no float16.
"""

from typing import Any

import triton
import triton.language as tl

from .eight_bits import INTERPRETED

EIGHT = tl.constexpr(8.0)
# 2**-3 and -(1024 + 8) * 2**-3, 2**-7 and -(1024 + 16 * 8) * 2**-7
REGISTERS = """{
    .reg .b32 bytes, more, low, high, low_unit, low_offset, high_unit, high_offset;
    mov.b32 low_unit, 0x30003000;
    mov.b32 low_offset, 0xd808d808;
    mov.b32 high_unit, 0x20002000;
    mov.b32 high_offset, 0xc880c880;
"""


def unpack(source: str, low: str, high: str, low_scale: str, high_scale: str) -> str:
    """Assembly: of the bytes 0 and 2 of a register two float16 each of the low and the high bits.

    The operation of lop3 is (a & b) ^ c.
    """
    return f"""
    lop3.b32 low, {source}, 0x000f000f, 0x64086408, 0x6a;
    lop3.b32 high, {source}, 0x00f000f0, 0x64806480, 0x6a;
    fma.rn.f16x2 low, low, low_unit, low_offset;
    fma.rn.f16x2 high, high, high_unit, high_offset;
    mul.f16x2 {low}, low, {low_scale};
    mul.f16x2 {high}, high, {high_scale};
"""


# Four bytes, and the scales of their columns.
NEIGHBOURS: Any = tl.constexpr(
    f"""{REGISTERS}
    prmt.b32 bytes, $4, 0, 0x4140;
    prmt.b32 more, $4, 0, 0x4342;
    {unpack("bytes", "$0", "$2", "$5", "$7")}
    {unpack("more", "$1", "$3", "$6", "$8")}
    }}"""
)
# Two pairs of bytes.
EVEN_AND_ODD: Any = tl.constexpr(
    f"""{REGISTERS}
    mov.b32 bytes, $4;
    shr.u32 more, $4, 8;
    {unpack("bytes", "$0", "$2", "$5", "$6")}
    {unpack("more", "$1", "$3", "$5", "$6")}
    }}"""
)


@triton.jit
def halves(bytes, low, high, DTYPE: tl.constexpr):
    """The columns of the first and of the second half of rows, times `low` and `high`."""
    if INTERPRETED or tl.float32 == DTYPE:
        tiles = plain(bytes, low, DTYPE), plain(bytes >> 4, high, DTYPE)
    else:
        tiles = tl.inline_asm_elementwise(
            NEIGHBOURS,
            "=r,=r,=r,=r,r,r,r,r,r", [bytes, low, high], dtype=(tl.float16, tl.float16),
            is_pure=True, pack=4,
        )  # fmt: skip
    return tiles


@triton.jit
def quarters(pairs, low, high, DTYPE: tl.constexpr):
    """Of pairs of bytes, the even and the odd columns of the first half, and of the second."""
    if INTERPRETED or tl.float32 == DTYPE:
        tiles = (
            plain(pairs, low, DTYPE), plain(pairs >> 8, low, DTYPE),
            plain(pairs >> 4, high, DTYPE), plain(pairs >> 12, high, DTYPE),
        )  # fmt: skip
    else:
        tiles = tl.inline_asm_elementwise(
            EVEN_AND_ODD,
            "=r,=r,=r,=r,r,r,r", [pairs, low, high],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return tiles


@triton.jit
def plain(bits, scale, DTYPE: tl.constexpr):
    """The numbers in the lowest four bits, times an eighth of a scale."""
    return (((bits & 15) ^ 8).to(DTYPE) - 8.0) * 0.125 * scale.to(DTYPE)


def offset_numbers(constants: tuple[int, int], shift: int) -> Any:
    """Assembly: two pairs of bytes as two numbers each of the even and odd columns of both halves.

    `constants` are the 16 bits of base + 8 for the low and for the high bits: an exclusive or with
    them puts four bits, whose sign bit is turned, into the mantissa of base. The high bits are
    taken `shift` places further down.
    """
    low, high = (f"0x{bits:04x}{bits:04x}" for bits in constants)
    mask = f"0x{240 >> shift:04x}{240 >> shift:04x}"
    return tl.constexpr(
        f"""{{
    .reg .b32 low, high;
    shr.b32 high, $4, {shift};
    lop3.b32 $0, $4, 0x000f000f, {low}, 0x6a;
    lop3.b32 $1, high, {mask}, {high}, 0x6a;
    shr.b32 low, $4, 8;
    shr.b32 high, $4, {8 + shift};
    lop3.b32 $2, low, 0x000f000f, {low}, 0x6a;
    lop3.b32 $3, high, {mask}, {high}, 0x6a;
    }}"""
    )


# 1024 + 8 and 64 + 8 in float16, of the low bits and of the high ones; 128 + 8 in bfloat16.
IN_FLOAT16 = offset_numbers((0x6408, 0x5480), shift=0)
IN_BFLOAT16 = offset_numbers((0x4308, 0x4308), shift=4)
LOW_IN_FLOAT16, HIGH_IN_FLOAT16 = tl.constexpr(1032.0), tl.constexpr(72.0)
OFFSET_IN_BFLOAT16 = tl.constexpr(136.0)


@triton.jit
def offset_float16(pairs):
    """Of pairs of bytes the even columns of both halves, then the odd ones, plus an offset each."""
    if INTERPRETED:
        tiles = offset_plain(pairs, LOW_IN_FLOAT16, HIGH_IN_FLOAT16, tl.float16)
    else:
        tiles = tl.inline_asm_elementwise(
            IN_FLOAT16, "=r,=r,=r,=r,r", [pairs],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return tiles


@triton.jit
def offset_bfloat16(pairs):
    """As `offset_float16`, in bfloat16 and with one offset for all."""
    if INTERPRETED:
        tiles = offset_plain(pairs, OFFSET_IN_BFLOAT16, OFFSET_IN_BFLOAT16, tl.bfloat16)
    else:
        tiles = tl.inline_asm_elementwise(
            IN_BFLOAT16, "=r,=r,=r,=r,r", [pairs],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    return tiles


@triton.jit
def offset_plain(pairs, low, high, DTYPE: tl.constexpr):
    return (
        offset(pairs, low, DTYPE), offset(pairs >> 4, high, DTYPE),
        offset(pairs >> 8, low, DTYPE), offset(pairs >> 12, high, DTYPE),
    )  # fmt: skip


@triton.jit
def offset(bits, by, DTYPE: tl.constexpr):
    return (((bits & 15) ^ 8).to(tl.float32) + (by - 8.0)).to(DTYPE)

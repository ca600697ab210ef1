"""Products of caches of eight bits are float16's: what a GPU makes of eight bits fastest.

Two numbers of float8 become float16 by one instruction instead of bfloat16's four, of int8 by two
and a half instead of five. Every number of eight bits is a float16. Queries and weights have powers
of two as factors, so that they use float16's range.
"""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from .registers import LAYOUT, NUMBERS, load, wide

LARGEST_EXPONENT = 14  # of a row of queries, times its factor
BIAS, MANTISSA = 127, 23  # of float32: what is added to exponents, and the bits behind them
MOST = BIAS + 100  # of a factor, so that its reciprocal stays a normal number where it is scaled
LEAST_UNIT = 2.0 ** (BIAS - MOST)  # what is hidden, -inf, times 0 would be NaN


def queries_in_float16(source, target, scale):
    """Rewrites a warpgroup's queries times a scale; the factor that each row's products need.

    `source` and `target` are views of their memory, `bfloat16[64, head_dim]` and
    `float16[64, head_dim]`. What of a row is below its largest number by more than 2^28 loses bits.
    """
    rows = load(source, LAYOUT).astype(jnp.float32) * scale
    up, down = factors(jnp.abs(rows).max(axis=1))
    target[...] = (rows * wide(up, rows)).astype(jnp.float16)
    plgpu.commit_smem()  # all warps have written
    return down


def factors(largest, exponent: int = LARGEST_EXPONENT):
    """The power of two that gives the largest number of a row an exponent, and 1 over it."""
    up = jnp.minimum(2 * BIAS + exponent - exponent_of(largest), MOST)
    return power(up), power(2 * BIAS - up)


def exponent_of(number):
    """Biased, without the sign, which a NaN may have."""
    bits = lax.bitcast_convert_type(number, jnp.int32)
    return lax.shift_right_logical(bits, MANTISSA) & 255


def power(biased):
    return lax.bitcast_convert_type(lax.shift_left(biased, MANTISSA), jnp.float32)


def weight_exponent(dtype) -> int:
    """Weights are at most this power of two: float16 has few bits for those far below 1."""
    return 15 if dtype == jnp.float16 else 0


def float16_of(numbers, layout=NUMBERS):
    """The same numbers, of `int8` or float8 `[rows, columns]` in registers, eight to a vector."""
    if numbers.dtype != jnp.int8:
        return numbers.astype(jnp.float16)
    result = plgpu.ShapeDtypeStruct(numbers.shape, jnp.float16, layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(from_int8)(numbers)


def from_int8(_, numbers):
    """A byte `n + 128` in the low bits of 1024 makes `n + 1152`."""
    float16, elements = ir.F16Type.get(), numbers.registers.flat
    wider = [vector.bitcast(vector_of(8, float16), in_pairs(element)) for element in elements]
    registers = np.array(wider, dtype=object).reshape(numbers.registers.shape)
    return mgpu.FragmentedArray(_registers=registers, _layout=numbers.layout, _is_signed=None)


def in_pairs(eight):
    i32 = ir.IntegerType.get_signless(32)
    words = vector.bitcast(vector_of(2, i32), eight)
    words = [vector.extract(words, dynamic_position=[], static_position=[i]) for i in range(2)]
    flip = arith.constant(i32, ir.IntegerAttr.get(i32, 0x80808080 - (1 << 32)))
    words = [arith.xori(word, flip) for word in words]
    pairs = [pair(i32, word, places) for word in words for places in ("0x4140", "0x4342")]
    return vector.from_elements(vector_of(4, i32), pairs)


def pair(i32, word, places) -> Any:
    text = f"""
    {{
    .reg .b32 raised, by;
    prmt.b32 raised, $1, 0x64646464, {places};
    mov.b32 by, 0x64806480;
    sub.f16x2 $0, raised, by;
    }}
    """
    return llvm.inline_asm(i32, [word], text, "=r,r")


def vector_of(size, element):
    return ir.VectorType.get((size,), element)

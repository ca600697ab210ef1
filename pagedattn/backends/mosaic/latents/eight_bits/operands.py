"""Latents of eight bits as operands of products, in registers: no 16-bit copy of them is in memory.

The rows of a left operand are keys where logits are computed, and columns of the values where these
are added up. A thread loads 16 numbers of a key at once, or eight values: they are what it has of
the operand, so rows and columns are in an order of their own. Of each eight keys it is that in
which the threads that load values meet in no bank of shared memory.
"""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from ...dense.float16 import pair, vector_of
from ..kernel_config import KEYS, VALUE_DIM
from .warpgroups import HALVES

LAYOUT = plgpu.Layout.WGMMA
PIECE = 64  # columns, of a product over all that a row of a swizzled tile holds
FEW_KEYS = 16  # of a product over keys
COLUMNS = VALUE_DIM // HALVES
MATRICES = COLUMNS // PIECE
# Lanes have bits 2, 0 and 1 of a key's number among eight, as `position_of_row` has it.
KEY_NUMBERS = plgpu.Layout.TILED(
    plgpu.Tiling(((KEYS, PIECE), (16, PIECE), (8, PIECE), (4, PIECE), (2, PIECE), (16,))),
    warp_dims=(-11,),
    lane_dims=(-7, -3, -5, -2),
    vector_dim=-1,
)
VALUE_NUMBERS = plgpu.Layout.TILED(
    plgpu.Tiling(((FEW_KEYS, COLUMNS), (8, PIECE), (4, 8), (2, 8))),
    warp_dims=(-7,),
    lane_dims=(-5, -6, -2),
    vector_dim=-1,
)
# One number for each eight of the values.
VALUE_VECTORS = plgpu.Layout.TILED(
    plgpu.Tiling(((FEW_KEYS, COLUMNS // 8), (8, 8), (4, 1), (2, 1))),
    warp_dims=(-7,),
    lane_dims=(-5, -6, -2),
    vector_dim=-1,
)
OUT = plgpu.Layout.TILED(
    plgpu.Tiling(((8, COLUMNS), (8, PIECE), (2, 8))),
    warp_dims=(-5,),
    lane_dims=(-3, -4),
    vector_dim=-1,
)
# Queries as they lie in memory, and with their columns in the order of a key's numbers.
QUERY = plgpu.Layout.TILED(
    plgpu.Tiling(((4, PIECE), (16,), (2,))), warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1
)
QUERY_COLUMNS = plgpu.Layout.TILED(
    plgpu.Tiling(((4, PIECE), (8,), (2,))), warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1
)
PAIRS_OF_LOW, PAIRS_OF_HIGH = "0x5140", "0x7362"  # bytes of two words, side by side


def position_of_row(row):
    """The key of a row of the logits: bits 0 and 1 of its number change places."""
    return (row & ~3) | ((row & 1) << 1) | ((row >> 1) & 1)


def inline(function, arguments, layouts, results):
    return plgpu.inline_mgpu(arg_types=layouts, return_type=results)(function)(*arguments)


def key_operand(numbers):
    """`[KEYS, PIECE]` in float16, keys in the order of rows, from `KEY_NUMBERS`."""
    result = plgpu.ShapeDtypeStruct(numbers.shape, jnp.float16, layout=LAYOUT)
    return inline(keys_as_rows, (numbers,), (KEY_NUMBERS,), result)


def value_operands(numbers):
    """The matrices `[64, FEW_KEYS]` of half the values in float16, from `VALUE_NUMBERS`."""
    result = plgpu.ShapeDtypeStruct((PIECE, FEW_KEYS), jnp.float16, layout=LAYOUT)
    return inline(values_as_rows, (numbers,), (VALUE_NUMBERS,), (result,) * MATRICES)


def seen_alone(numbers, seen):
    """Half the values of some keys, and zeros for those that are not `seen`: bits, all or none."""
    result = plgpu.ShapeDtypeStruct(numbers.shape, numbers.dtype, layout=VALUE_NUMBERS)
    return inline(masked, (numbers, seen), (VALUE_NUMBERS, VALUE_VECTORS), result)


def query_columns(queries):
    """A piece of the queries with columns in the order in which products take a key's."""
    result = plgpu.ShapeDtypeStruct(queries.shape, queries.dtype, layout=QUERY_COLUMNS)
    return inline(columns_of_keys, (queries,), (QUERY,), result)


def results_of(matrices):
    """`[heads, COLUMNS]` of sums that are transposed matrices of 64 columns."""
    shape = matrices[0].shape[1], COLUMNS
    result = plgpu.ShapeDtypeStruct(shape, matrices[0].dtype, layout=OUT)
    return inline(columns_in_order, matrices, (LAYOUT,) * MATRICES, result)


def largest(matrix, scratch):
    """Of each column of `f32[keys, heads]`; `scratch` is the warpgroup's own."""
    return reduced(largest_of_rows, matrix, scratch)


def total(matrix, scratch):
    return reduced(total_of_rows, matrix, scratch)


def reduced(function, matrix, scratch):
    layout = LAYOUT.reduce(0)
    result = plgpu.ShapeDtypeStruct(matrix.shape[1:], matrix.dtype, layout=layout)
    return inline(function, (matrix, scratch), (LAYOUT, plgpu.RefType()), result)


def largest_of_rows(_, matrix, scratch):
    return matrix.reduce("max", 0, scratch)


def total_of_rows(_, matrix, scratch):
    return matrix.reduce("add", 0, scratch)


def keys_as_rows(_, numbers):
    registers = np.empty((PIECE // 8, 2), object)
    for half, sixteen in enumerate(numbers.registers.flat):
        widen = widening(numbers.mlir_dtype)
        pairs = [two for word in words_of(sixteen) for two in widen(word)]
        registers[:, half] = [vector.bitcast(two_float16(), two) for two in pairs]
    return array_of(registers, numbers.shape, LAYOUT)


def values_as_rows(_, numbers):
    widen = widening(numbers.mlir_dtype)
    registers = np.empty((MATRICES, 2, 2), object)  # of keys from 8 on, of columns from 4 on
    eights = [words_of(eight) for eight in numbers.registers.flat]
    for half in range(2):
        even, odd = eights[2 * half : 2 * half + 2]
        for later, words in enumerate(zip(even, odd, strict=True)):
            places = PAIRS_OF_LOW, PAIRS_OF_HIGH
            pairs = [two for four in places for two in widen(permuted(*words, four))]
            for matrix, two in enumerate(pairs):
                registers[matrix, half, later] = vector.bitcast(two_float16(), two)
    return tuple(array_of(matrix, (PIECE, FEW_KEYS), LAYOUT) for matrix in registers)


def masked(_, numbers, seen):
    registers = np.empty(numbers.registers.shape, object)
    places = zip(np.ndindex(*registers.shape), seen.registers.flat, strict=True)
    for place, mask in places:
        words = [arith.andi(word, part_of(mask, 0)) for word in words_of(numbers.registers[place])]
        words = vector.from_elements(vector_of(len(words), i32()), words)
        registers[place] = vector.bitcast(numbers.registers[place].type, words)
    return mgpu.FragmentedArray(
        _registers=registers, _layout=numbers.layout, _is_signed=numbers.is_signed
    )


def columns_of_keys(_, queries):
    # JAX 0.11 takes what leaves with the registers that came for the same array.
    queries = mgpu.optimization_barrier(queries)
    return array_of(queries.registers, queries.shape, QUERY_COLUMNS)


def columns_in_order(_, *matrices):
    """A thread has eight columns side by side: two of each matrix."""
    heads = matrices[0].shape[1]
    element = matrices[0].mlir_dtype
    registers = np.empty((heads // 8, 2), object)  # of odd heads
    parts = [matrix.registers.reshape(heads // 8, 2) for matrix in matrices]
    for eight, odd in np.ndindex(*registers.shape):
        column = [part_of(part[eight, half], odd) for half in range(2) for part in parts]
        registers[eight, odd] = vector.from_elements(vector_of(8, element), column)
    return array_of(registers, (heads, COLUMNS), OUT)


def array_of(registers, shape, layout):
    layout = layout.to_mgpu()
    registers = registers.reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def words_of(numbers) -> list[Any]:
    count = ir.VectorType(numbers.type).shape[0] // 4
    words = vector.bitcast(vector_of(count, i32()), numbers)
    return [part_of(words, i) for i in range(count)]


def part_of(numbers, place: int):
    return vector.extract(numbers, dynamic_position=[], static_position=[place])


def i32():
    return ir.IntegerType.get_signless(32)


def two_float16():
    return vector_of(2, ir.F16Type.get())


def permuted(low, high, places: str):
    text = f"prmt.b32 $0, $1, $2, {places};"
    return llvm.inline_asm(i32(), [low, high], text, "=r,r,r")


def widening(dtype):
    """A function from a word of four numbers to two words of two float16 each."""
    if isinstance(dtype, ir.IntegerType):
        return from_int8
    kind = "e4m3" if isinstance(dtype, ir.Float8E4M3FNType) else "e5m2"
    return lambda word: [from_float8(word, kind, half) for half in ("low", "high")]


def from_int8(word) -> list[Any]:
    flip = arith.constant(i32(), ir.IntegerAttr.get(i32(), 0x80808080 - (1 << 32)))
    word = arith.xori(word, flip)
    return [vector_of_one(pair(i32(), word, places)) for places in ("0x4140", "0x4342")]


def from_float8(word, kind: str, half: str):
    text = f"""
    {{
    .reg .b16 low, high;
    mov.b32 {{low, high}}, $1;
    cvt.rn.f16x2.{kind}x2 $0, {half};
    }}
    """
    return vector_of_one(llvm.inline_asm(i32(), [word], text, "=r,r"))


def vector_of_one(word):
    return vector.from_elements(vector_of(1, i32()), [word])

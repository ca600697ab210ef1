"""Values of eight bits as left operands, in registers: no 16-bit copy of them is in memory.

A thread loads eight values of a key at once, which are what it has of the operands: so their rows,
columns of the values, are in an order of their own. Of each eight keys the order is that in which
the threads that load values meet in no bank of shared memory: weights are in the same order.
"""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from ...dense.float16 import pair, vector_of
from ...dense.registers import LAYOUT
from ..kernel_config import KEYS, VALUE_DIM
from ..softmax import bits
from .roles import HALVES

PIECE = 64  # columns of values in one product; in eight bits also the bytes of a swizzled row
FEW_KEYS = 16  # of a product over keys
COLUMNS = VALUE_DIM // HALVES
MATRICES = COLUMNS // PIECE
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
# Weights, of which a thread has two keys of a head. Lanes and registers have bits 2, 0 and 1 of a
# key's number among eight, as those of values do.
WEIGHTS = plgpu.Layout.TILED(
    plgpu.Tiling(((8, KEYS), (8, 16), (8, 8), (8, 4), (2, 4), (2,))),
    warp_dims=(-10,),
    lane_dims=(-6, -3, -2, -5),
    vector_dim=-1,
)
LARGEST_WEIGHT = 15.0  # as a power of two: float16 ends at 16
# Named barrier 15: JAX's own, one for each warpgroup, are the first ones.
WARPGROUP_ANY = """
    {
    .reg .pred some;
    fence.proxy.async.shared::cta;
    barrier.cta.red.or.pred some, 15, 128, $1;
    selp.b32 $0, 1, 0, some;
    }
"""
PAIRS_OF_LOW, PAIRS_OF_HIGH = "0x5140", "0x7362"  # bytes of two words, side by side


def inline(function, arguments, layouts, results):
    return plgpu.inline_mgpu(arg_types=layouts, return_type=results)(function)(*arguments)


def weight_operand(weights):
    """Weights `float16[KEYS, heads]` by heads, of keys in the order of the values' operands."""
    result = plgpu.ShapeDtypeStruct(weights.shape[::-1], weights.dtype, layout=WEIGHTS)
    return inline(weights_as_rows, (weights,), (LAYOUT,), result)


def value_operands(numbers):
    """The matrices `[64, FEW_KEYS]` of half the values in float16, from `VALUE_NUMBERS`."""
    result = plgpu.ShapeDtypeStruct((PIECE, FEW_KEYS), jnp.float16, layout=LAYOUT)
    return inline(values_as_rows, (numbers,), (VALUE_NUMBERS,), (result,) * MATRICES)


def seen_alone(numbers, seen):
    """Half the values of some keys, and zeros for those that are not `seen`: bits, all or none."""
    result = plgpu.ShapeDtypeStruct(numbers.shape, numbers.dtype, layout=VALUE_NUMBERS)
    return inline(masked, (numbers, seen), (VALUE_NUMBERS, VALUE_VECTORS), result)


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


def any_too_large(sizes):
    """Whether one of a warpgroup's sizes of weights is more than float16 takes.

    What its threads stored is seen by then, as after `commit_smem`, in whose place this is.
    """
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
    return inline(too_large, (sizes,), (LAYOUT,), result)


def reduced(function, matrix, scratch):
    layout = LAYOUT.reduce(0)
    result = plgpu.ShapeDtypeStruct(matrix.shape[1:], matrix.dtype, layout=layout)
    return inline(function, (matrix, scratch), (LAYOUT, plgpu.RefType()), result)


def largest_of_rows(_, matrix, scratch):
    return matrix.reduce("max", 0, scratch)


def total_of_rows(_, matrix, scratch):
    return matrix.reduce("add", 0, scratch)


def too_large(_, sizes):
    limit, flag = arith.constant(ir.F32Type.get(), 2.0**LARGEST_WEIGHT), arith.constant(bits(1), 0)
    for two in sizes.registers.flat:
        for i in range(2):
            flag = arith.ori(flag, arith.cmpf(arith.CmpFPredicate.OGT, part_of(two, i), limit))
    vote = llvm.inline_asm(bits(32), [flag], WARPGROUP_ANY, "=r,b", has_side_effects=True)
    return mgpu.FragmentedArray.splat(vote, (), is_signed=True)  # pyright: ignore[reportArgumentType]


def weights_as_rows(_, weights):
    """Two threads whose keys are 2 apart exchange numbers: one has both keys of the even head."""
    registers = np.empty(weights.registers.shape, object)
    for place in np.ndindex(*registers.shape):
        word = part_of(vector.bitcast(vector_of(1, bits(32)), weights.registers[place]), 0)
        registers[place] = vector.bitcast(two_float16(), vector_of_one(exchanged(word)))
    return array_of(registers, weights.shape[::-1], WEIGHTS)


def exchanged(word):
    text = """
    {
    .reg .b32 lane, mine, given, taken, both;
    .reg .pred odd;
    mov.u32 lane, %laneid;
    and.b32 lane, lane, 8;
    setp.ne.b32 odd, lane, 0;
    selp.b32 mine, 0x1010, 0x3232, odd;
    selp.b32 both, 0x3254, 0x5410, odd;
    prmt.b32 given, $1, $1, mine;
    shfl.sync.bfly.b32 taken, given, 8, 31, 0xffffffff;
    prmt.b32 $0, $1, taken, both;
    }
    """
    return llvm.inline_asm(bits(32), [word], text, "=r,r", has_side_effects=True)


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
        words = vector.from_elements(vector_of(len(words), bits(32)), words)
        registers[place] = vector.bitcast(numbers.registers[place].type, words)
    return mgpu.FragmentedArray(
        _registers=registers, _layout=numbers.layout, _is_signed=numbers.is_signed
    )


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
    words = vector.bitcast(vector_of(count, bits(32)), numbers)
    return [part_of(words, i) for i in range(count)]


def part_of(numbers, place: int):
    return vector.extract(numbers, dynamic_position=[], static_position=[place])


def two_float16():
    return vector_of(2, ir.F16Type.get())


def permuted(low, high, places: str):
    text = f"prmt.b32 $0, $1, $2, {places};"
    return llvm.inline_asm(bits(32), [low, high], text, "=r,r,r")


def widening(dtype):
    """A function from a word of four numbers to two words of two float16 each."""
    if isinstance(dtype, ir.IntegerType):
        return from_int8
    kind = "e4m3" if isinstance(dtype, ir.Float8E4M3FNType) else "e5m2"
    return lambda word: [from_float8(word, kind, half) for half in ("low", "high")]


def from_int8(word) -> list[Any]:
    flip = arith.constant(bits(32), ir.IntegerAttr.get(bits(32), 0x80808080 - (1 << 32)))
    word = arith.xori(word, flip)
    return [vector_of_one(pair(bits(32), word, places)) for places in ("0x4140", "0x4342")]


def from_float8(word, kind: str, half: str):
    text = f"""
    {{
    .reg .b16 low, high;
    mov.b32 {{low, high}}, $1;
    cvt.rn.f16x2.{kind}x2 $0, {half};
    }}
    """
    return vector_of_one(llvm.inline_asm(bits(32), [word], text, "=r,r"))


def vector_of_one(word):
    return vector.from_elements(vector_of(1, bits(32)), [word])

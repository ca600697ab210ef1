"""The running softmax, in base 2."""

import math
from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from ..dense.registers import LAYOUT
from ..warpgroup import THREADS
from .kernel_config import KernelConfig

LOG2_E = math.log2(math.e)
SLACK = 8.0  # by which logits may exceed the top before there is a new one


class State(NamedTuple):
    """Of each row: about the largest logit so far, and a sum of weights relative to it."""

    top: Any
    total: Any


def reduction_floats(heads: int) -> int:
    """float32 scratch to reduce over rows of `[64, heads]`: two a thread for each eight heads."""
    return heads // 8 * 2 * THREADS


def wide(numbers, like, axis: int = 0):
    """One value for each row, or for each column, as a matrix."""
    return lax.broadcast_in_dim(numbers, like.shape, [axis])


def finite(top):
    return jnp.where(top == -jnp.inf, 0.0, top)


def correction(before, top):
    """Online softmax: the factor on earlier sums when the top changes."""
    return jnp.exp2(before - finite(top))


def weigh(config: KernelConfig, x, before, heads_axis: int):
    """The weights of dot products, the tops after `before`, and by what earlier sums shrink.

    A top stays while logits exceed it by little: weights are then above 1, and no sum shrinks.
    """
    factor = config.scale * LOG2_E
    if factor <= 0:
        x, factor = jnp.where(x == -jnp.inf, x, x * factor), 1.0
    largest = x.max(axis=1 - heads_axis) * factor
    top = jnp.where(largest > before + SLACK, largest, before)
    weights = jnp.exp2(x * factor - wide(finite(top), x, heads_axis))
    return weights, top, correction(before, top)


WARP_ANY = "{.reg .pred p; vote.sync.any.pred p, $1, 0xffffffff; selp.b32 $0, 1, 0, p;}"


def shrink(sums, correction):
    """`sums f32[rows, columns]` times `correction f32[rows]`.

    A warp whose factors are all 1 skips the products: so it is in most steps.
    """
    return conditional_product(if_any_row, (sums,), correction, LAYOUT.reduce(1))[0]


def shrink_columns(sums: tuple, correction):
    """Some matrices `f32[rows, columns]` times `correction f32[columns]`, as by `shrink`."""
    return conditional_product(if_any_column, sums, correction, LAYOUT.reduce(0))


def conditional_product(function, sums: tuple, correction, layout):
    results = tuple(plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=LAYOUT) for x in sums)
    layouts = (LAYOUT,) * len(sums), layout
    return plgpu.inline_mgpu(arg_types=layouts, return_type=results)(function)(sums, correction)


def if_any_row(_, sums, correction):
    return if_any(sums, correction, 0)


def if_any_column(_, sums, correction):
    return if_any(sums, correction, 1)


def if_any(sums, correction, axis: int):
    registers = [x for matrix in sums for x in matrix.registers.flat]
    branch = scf.IfOp(voted(changed(correction)), [x.type for x in registers], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        wide_ones = (correction.broadcast_in_dim(x.shape, (axis,), x.layout) for x in sums)
        products = [x * factor for x, factor in zip(sums, wide_ones, strict=True)]
        scf.yield_([x for matrix in products for x in matrix.registers.flat])
    with ir.InsertionPoint(branch.else_block):  # pyright: ignore
        scf.yield_(registers)
    results = iter(branch.results)
    return tuple(of_registers(matrix, results) for matrix in sums)


def of_registers(like, registers):
    """A matrix like another one, of the next registers."""
    own = [next(registers) for _ in like.registers.flat]
    own = np.array(own, dtype=object).reshape(like.registers.shape)
    return mgpu.FragmentedArray(_registers=own, _layout=like.layout, _is_signed=None)


def changed(correction):
    """Whether a factor of this thread is not 1."""
    one, flag = arith.constant(ir.F32Type.get(), 1.0), arith.constant(bits(1), 0)
    for value in {id(x): x for x in correction.registers.flat}.values():
        for i in range(ir.VectorType(value.type).shape[0]):
            number = vector.extract(value, dynamic_position=[], static_position=[i])
            flag = arith.ori(flag, arith.cmpf(arith.CmpFPredicate.UNE, number, one))
    return flag


def voted(flag):
    """Whether a flag is set in any thread of the warp."""
    zero = arith.constant(bits(32), 0)
    some = llvm.inline_asm(bits(32), [flag], WARP_ANY, "=r,b", has_side_effects=True)
    return arith.cmpi(arith.CmpIPredicate.ne, some, zero)  # pyright: ignore[reportArgumentType]


def bits(number: int):
    return ir.IntegerType.get_signless(number)

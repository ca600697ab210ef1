"""Sums for new tops, by a branch that a warp takes only when one of its rows has a new one.

Tops change in few steps, and to multiply 128 registers is long beside a step. Pallas has no branch
of a warp by values of its threads, so this is written in MLIR.
"""

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from .softmax import LAYOUT

VOTE = "{.reg .pred p; vote.sync.any.pred p, $1, 0xffffffff; selp.b32 $0, 1, 0, p;}"


def shrink(sums, kept):
    """`sums f32[rows, columns]` times `kept f32[rows]`."""
    result = plgpu.ShapeDtypeStruct(sums.shape, sums.dtype, layout=LAYOUT)
    layouts = LAYOUT, LAYOUT.reduce(1)
    return plgpu.inline_mgpu(arg_types=layouts, return_type=result)(if_any)(sums, kept)


def if_any(_, sums, kept):
    registers = list(sums.registers.flat)
    branch = scf.IfOp(voted(changed(kept)), [x.type for x in registers], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        product = sums * kept.broadcast_in_dim(sums.shape, (0,), sums.layout)
        scf.yield_(list(product.registers.flat))
    with ir.InsertionPoint(branch.else_block):  # pyright: ignore
        scf.yield_(registers)
    results = np.array(list(branch.results), dtype=object).reshape(sums.registers.shape)
    return mgpu.FragmentedArray(_registers=results, _layout=sums.layout, _is_signed=None)


def changed(kept):
    """Whether a factor of this thread is not 1."""
    one, flag = arith.constant(ir.F32Type.get(), 1.0), arith.constant(bits(1), 0)
    for value in {id(x): x for x in kept.registers.flat}.values():
        number = vector.extract(value, dynamic_position=[], static_position=[0])
        flag = arith.ori(flag, arith.cmpf(arith.CmpFPredicate.UNE, number, one))
    return flag


def voted(flag):
    """Whether a flag is set in any thread of the warp."""
    zero = arith.constant(bits(32), 0)
    some = llvm.inline_asm(bits(32), [flag], VOTE, "=r,b", has_side_effects=True)
    return arith.cmpi(arith.CmpIPredicate.ne, some, zero)  # pyright: ignore[reportArgumentType]


def bits(number: int):
    return ir.IntegerType.get_signless(number)

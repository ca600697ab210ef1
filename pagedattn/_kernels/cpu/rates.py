"""How fast the CPU at hand multiplies: pairs of bfloat16 are twice the work of float32, or half.

AMD's multiply a vector of pairs in the time of one of float32; Intel's take four times as long.
"""

import functools
import time

import numpy as np
from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils

from .compiling import MODE, intrinsic
from .simd import LANES, PAIRS, VECTOR, add_pairs, at, fused, load, store, word

SUMS, TURNS, TRIES = 24, 1000, 5  # as many sums as hide the latency of each
SLOWER = 2.0  # products of pairs that take longer than this, in those of float32, lose


def _products(pairs):
    @intrinsic
    def products(typing, numbers, turns):
        """Multiplies the vector at an address with itself, again and again, in registers."""

        def code(context, builder, signature, args):
            numbers, turns = args
            place = at(builder, numbers, word(0), VECTOR)
            vector = load(builder, place, 4)
            firsts = [ir.Constant(VECTOR, [float(i)] * LANES) for i in range(SUMS)]
            totals = [cgutils.alloca_once_value(builder, first) for first in firsts]
            with cgutils.for_range(builder, turns):
                for total in totals:
                    held = builder.load(total)
                    added = _add(builder, held, vector, pairs)
                    builder.store(added, total)
            joined = builder.load(totals[0])
            for total in totals[1:]:  # else LLVM computes but one of them
                joined = builder.fadd(joined, builder.load(total))
            store(builder, joined, place, 4)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), code

    return products


def _add(builder, total, vector, pairs):
    if pairs:
        numbers = builder.bitcast(vector, ir.VectorType(ir.IntType(16), 2 * LANES))
        return add_pairs(builder, total, numbers, numbers)
    return fused(builder, vector, vector, total)


def _seconds(pairs: bool) -> float:
    """The least that a function of TURNS takes."""
    products = _products(pairs)
    compiled = cfunc(types.void(types.intp, types.intp), **MODE)(lambda a, b: products(a, b))
    numbers, taken = np.zeros(2 * LANES, np.float32), []
    for _ in range(TRIES):
        begin = time.perf_counter()
        compiled.ctypes(numbers.ctypes.data, TURNS)
        taken.append(time.perf_counter() - begin)
    return min(taken)


@functools.cache
def pairs_are_faster() -> bool:
    """Whether products of pairs of bfloat16 do more work a second than those of float32."""
    return PAIRS and _seconds(True) < SLOWER * _seconds(False)

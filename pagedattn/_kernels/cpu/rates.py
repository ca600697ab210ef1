"""How fast the CPU at hand multiplies: pairs of bfloat16 are twice the work of float32, or half.

AMD's multiply a vector of pairs in the time of one of float32; Intel's take three to four times as
long.
"""

import functools
import time

import numpy as np
from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils

from .compiling import MODE, intrinsic
from .simd import HAS_BF16_DOT, I16, LANES, VECTOR, add_pairs, at, fused, i64, load, store

SUMS, TURNS = 24, 1000  # as many sums as hide the latency of each
TRIES = 100  # in turns, 3 ms in all: with 5 tries under load, one machine changed its answer
SLOWER = 2.0  # products of pairs that take longer than this, in those of float32, lose


def _products(pairs):
    @intrinsic
    def products(typing, numbers, turns):
        """Multiplies the vector at an address with itself, again and again, in registers."""

        def code(context, builder, signature, args):
            numbers, turns = args
            place = at(builder, numbers, i64(0), VECTOR)
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
        numbers = builder.bitcast(vector, ir.VectorType(I16, 2 * LANES))
        return add_pairs(builder, total, numbers, numbers)
    return fused(builder, vector, vector, total)


def _compiled(pairs: bool):
    products = _products(pairs)
    return cfunc(types.void(types.intp, types.intp), **MODE)(lambda a, b: products(a, b))


def _seconds(function, numbers: np.ndarray) -> float:
    """What TURNS take."""
    begin = time.perf_counter()
    function.ctypes(numbers.ctypes.data, TURNS)
    return time.perf_counter() - begin


@functools.cache
def pairs_are_faster() -> bool:
    """Whether products of pairs of bfloat16 do more work a second than those of float32."""
    if not HAS_BF16_DOT:
        return False
    functions = [_compiled(pairs) for pairs in (True, False)]
    numbers = np.zeros(2 * LANES, np.float32)
    taken = [[_seconds(function, numbers) for function in functions] for _ in range(TRIES)]
    of_pairs, of_floats = map(min, zip(*taken, strict=True))
    return of_pairs < SLOWER * of_floats

"""What a CPU computes at best without AMX: fused multiplications of float32, all in registers."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llvmlite import binding, ir
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

from benchmarks.case import CpuCase

LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8
SUMS = 12  # vectors: more than two units have under way, and registers for two more
VECTOR = ir.VectorType(ir.FloatType(), LANES)


def _numbers() -> ir.Constant:
    """A vector: of numbers that are all alike, an EPYC multiplied 8 % more a second."""
    return ir.Constant(VECTOR, [random.uniform(-1, 1) for _ in range(LANES)])


def _products(typing, turns):
    """A number that follows from all of `turns` times SUMS multiplications of vectors."""

    def code(context, builder, signature, args):
        kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
        fused = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
        factor = ir.Constant(VECTOR, [2.0**-20 - 1] * LANES)  # so that totals keep changing
        addend = _numbers()
        totals = [cgutils.alloca_once_value(builder, _numbers()) for _ in range(SUMS)]
        with cgutils.for_range(builder, args[0]):
            for total in totals:
                builder.store(builder.call(fused, [factor, builder.load(total), addend]), total)
        joined = builder.load(totals[0])
        for total in totals[1:]:
            joined = builder.fadd(joined, builder.load(total))
        return builder.extract_element(joined, ir.IntType(32)(0))

    return types.float32(types.intp), code


_multiply: Any = intrinsic(_products)


@cfunc(types.float32(types.intp))
def _turns(count):
    return _multiply(count)


def multiplications(case: CpuCase, threads: int) -> Callable[[], list[float]]:
    """As many operations as a case has, on so many threads."""
    pool = ThreadPoolExecutor(threads)
    counts = [int(case.flops / threads / (2 * SUMS * LANES))] * threads
    return lambda: list(pool.map(_turns.ctypes, counts))

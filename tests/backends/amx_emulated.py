"""AMX's instructions as loops over memory, for one thread: a program, run by `test_cpu_prompts.py`.

It takes the place of what `amx` writes of LLVM's, so the kernel around it is the real one. Its
registers are those of all threads, so a process that emulates does nothing else.
"""

import sys

import jax
import numpy as np
from numba.core import cgutils

jax.config.update("jax_platforms", "cpu")
from pagedattn._kernels.cpu.prefill import amx
from pagedattn._kernels.cpu.simd import (
    I32,
    I32_VECTOR,
    I64,
    VECTOR,
    ZEROS,
    add_pairs,
    at,
    i64,
    load,
    spread,
    store,
)

ROWS, ROW, TILE = 16, 64, 1024
REGISTERS = np.full(8 * TILE + ROW, 0xFF, np.uint8)  # NaN: what is not set is seen
BASE = -(-REGISTERS.ctypes.data // ROW) * ROW

called = set()


def _row(number, row):
    return i64(BASE + TILE * number.constant + ROW * row)


def tilezero(builder, number):
    for row in range(ROWS):
        store(builder, ZEROS, at(builder, _row(number, row), i64(0), VECTOR), 4)


def _address(builder, pointer):
    return builder.ptrtoint(pointer, I64)


def tileloadd64(builder, number, pointer, stride):
    for row in range(ROWS):
        source = builder.add(_address(builder, pointer), builder.mul(stride, i64(row)))
        line = load(builder, at(builder, source, i64(0), I32_VECTOR), 4)
        store(builder, line, at(builder, _row(number, row), i64(0), I32_VECTOR), 4)


def tilestored64(builder, number, pointer, stride):
    for row in range(ROWS):
        target = builder.add(_address(builder, pointer), builder.mul(stride, i64(row)))
        line = load(builder, at(builder, _row(number, row), i64(0), I32_VECTOR), 4)
        store(builder, line, at(builder, target, i64(0), I32_VECTOR), 4)


def tdpbf16ps(builder, c, a, b):
    for row in range(ROWS):
        place = at(builder, _row(c, row), i64(0), VECTOR)
        total = cgutils.alloca_once_value(builder, load(builder, place, 4))
        with cgutils.for_range(builder, i64(ROWS)) as loop:
            pair = at(builder, _row(a, row), builder.mul(loop.index, i64(4)), I32)
            left = spread(builder, load(builder, pair, 4))
            line = at(builder, _row(b, 0), builder.mul(loop.index, i64(ROW)), I32_VECTOR)
            right = load(builder, line, 4)
            builder.store(add_pairs(builder, builder.load(total), left, right), total)
        store(builder, builder.load(total), place, 4)


def ldtilecfg(builder, memory):
    pass


def tilerelease(builder):
    pass


def call(builder, name, *arguments):
    called.add(name)
    globals()[name](builder, *arguments)


def main() -> None:
    from cpu_prompts import check_all

    amx.is_allowed, amx._call = lambda: True, call
    check_all(threads=1)
    wanted = {"tilezero", "tileloadd64", "tilestored64", "tdpbf16ps", "ldtilecfg", "tilerelease"}
    assert called == wanted, called
    print("right")


if __name__ == "__main__":
    sys.path.insert(0, "tests/backends")
    main()

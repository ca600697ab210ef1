"""AMX: eight registers that each hold 16 rows of 64 bytes, and the product of two of them.

Linux gives their memory to a process that asks for it. A thread sets their shapes before it uses
them, and gives them back, since the system saves what is in use at each change of threads.
"""

import ctypes
import functools
import platform

from llvmlite import binding, ir
from numba.core import cgutils

from ..simd import FEATURES, I8, I16, I64, at, i64, store

REQUEST, TILE_DATA = 0x1023, 18  # ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA of Linux
ARCH_PRCTL = 158  # the number of the system call on x86-64
ROWS, ROW = 16, 64  # bytes of a row
CONFIG_BYTES = 64
IDLE = 8  # instructions that do nothing, behind each of AMX's

binding.initialize_native_asmparser()  # for these


@functools.cache
def is_allowed() -> bool:
    """Whether this process may use AMX's products of bfloat16; asks the system for it."""
    if not {"+amx-bf16", "+amx-tile"} <= {*FEATURES.split(",")} or platform.system() != "Linux":
        return False
    # Numba's settings may name another CPU than the one at hand.
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST, TILE_DATA) == 0


def product(builder, kernel, rows, arguments, adds):
    """C in registers 0 to 3, A in 4 and 5, B in 6 and 7; half of A's and C's for half the rows."""
    c, row_bytes, a, panels, panel_bytes, slabs = arguments
    high = rows // ROWS
    tiles = [(2 * i + j, i, j) for i in range(high) for j in range(2)]
    places = {}
    for register, i, j in tiles:
        corner = builder.add(c, builder.mul(row_bytes, i64(ROWS * i)))
        places[register] = builder.add(corner, i64(ROW * j))
    with builder.if_else(adds) as (added, set_):
        with added:
            for register, place in places.items():
                _load(builder, register, place, row_bytes)
        with set_:
            for register in places:
                _call(builder, "tilezero", _number(register))
    with cgutils.for_range_slice(builder, i64(0), slabs, i64(1), I64) as (slab, _):
        here = builder.add(a, builder.mul(slab, i64(kernel.block * ROW)))
        for i in range(high):
            _load(builder, 4 + i, builder.add(here, i64(ROWS * ROW * i)), i64(ROW))
        here = builder.add(panels, builder.mul(slab, i64(ROWS * ROW)))
        for j in range(2):
            panel = builder.add(here, builder.mul(panel_bytes, i64(j)))
            _load(builder, 6 + j, panel, i64(ROW))
        for register, i, j in tiles:
            _call(builder, "tdpbf16ps", *map(_number, (register, 4 + i, 6 + j)))
    for register, place in places.items():
        _call(builder, "tilestored64", _number(register), _pointer(builder, place), row_bytes)


def _load(builder, register, address, row_bytes):
    _call(builder, "tileloadd64", _number(register), _pointer(builder, address), row_bytes)


def _number(register):
    return I8(register)


def _pointer(builder, address):
    return builder.inttoptr(address, I8.as_pointer())


def _call(builder, name, *arguments):
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
    builder.call(function, arguments)
    # On virtual cores that share theirs, products and loads that follow each other closely took 32
    # ns for one of each, 22 with something in between; in fast moments 7.7 and 7.1.
    kind = ir.FunctionType(ir.VoidType(), [])
    builder.call(ir.InlineAsm(kind, "nop\n" * IDLE, "", side_effect=True), [])


def configure(builder, memory):
    """Sets the shapes of this thread's registers; `memory` is room for CONFIG_BYTES."""
    for offset in range(0, CONFIG_BYTES, 8):
        store(builder, i64(0), at(builder, memory, i64(offset), I64), 1)
    store(builder, I8(1), at(builder, memory, i64(0), I8), 1)  # the palette
    for register in range(8):
        store(builder, I16(ROW), at(builder, memory, i64(16 + 2 * register), I16), 1)
        store(builder, I8(ROWS), at(builder, memory, i64(48 + register), I8), 1)
    _call(builder, "ldtilecfg", _pointer(builder, memory))


def release(builder):
    """Gives this thread's registers back."""
    _call(builder, "tilerelease")

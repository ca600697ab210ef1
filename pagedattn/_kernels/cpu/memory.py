"""Numbers at raw addresses, for code that Numba compiles.

An address is an integer. Elements are counted from an address that stays the same in a loop, so
that LLVM sees through it and can use vectors.
"""

import ctypes
import os
import platform
from typing import Any

from llvmlite import ir
from numba import types

from ...errors import BackendUnavailableError
from .compiling import intrinsic

PROCESS = ctypes.CDLL(None) if os.name == "posix" else None


def system(name: str, signature: Any) -> Any:
    """A function of the system's C library, where it has it."""
    if not hasattr(PROCESS, name):
        raise BackendUnavailableError(
            f"backend 'numba' is not available: {platform.system()} lacks {name}, as POSIX has it; "
            "it runs on Linux and macOS"
        )
    return types.ExternalFunction(name, signature)


malloc = system("malloc", types.intp(types.uintp))
aligned_alloc = system("aligned_alloc", types.intp(types.uintp, types.uintp))
free = system("free", types.void(types.intp))
memcpy = system("memcpy", types.intp(types.intp, types.intp, types.uintp))
memset = system("memset", types.intp(types.intp, types.int32, types.uintp))
give_way = system("sched_yield", types.int32())


def element(builder, context, address, index, kind):
    """A pointer to element `index` of numbers of a Numba type."""
    base = builder.inttoptr(address, context.get_data_type(kind).as_pointer())
    return builder.gep(base, [index])


def _getter(kind):
    @intrinsic
    def get(typing, address, index):
        def code(context, builder, signature, args):
            return builder.load(element(builder, context, args[0], args[1], kind))

        return kind(types.intp, types.intp), code

    return get


def _setter(kind):
    @intrinsic
    def put(typing, address, index, number):
        def code(context, builder, signature, args):
            builder.store(args[2], element(builder, context, args[0], args[1], kind))
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, kind), code

    return put


get_int32, get_int64, get_float32 = map(_getter, (types.int32, types.int64, types.float32))
put_int32, put_int64, put_float32 = map(_setter, (types.int32, types.int64, types.float32))


@intrinsic
def add_at(typing, address, number):
    """Adds to an int64 that other threads use too, and gives what was there before."""

    def code(context, builder, signature, args):
        pointer = element(builder, context, args[0], ir.Constant(ir.IntType(64), 0), types.int64)
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.intp, types.int64), code


@intrinsic
def atomic_at(typing, address):
    """An int64 to which other threads add, without writing to its cache line."""

    def code(context, builder, signature, args):
        pointer = element(builder, context, args[0], ir.Constant(ir.IntType(64), 0), types.int64)
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.intp), code


def _call(builder, function, arguments):
    word = ir.IntType(64)
    kind = ir.FunctionType(word, [word] * len(arguments))
    return builder.call(builder.inttoptr(function, kind.as_pointer()), arguments)


@intrinsic
def call_at(typing, function, argument):
    """Calls a C function that takes and returns an address."""

    def code(context, builder, signature, args):
        return _call(builder, args[0], args[1:])

    return types.intp(types.intp, types.intp), code


@intrinsic
def call_3_at(typing, function, first, second, third):
    """Calls a C function that takes three addresses and returns one."""

    def code(context, builder, signature, args):
        return _call(builder, args[0], args[1:])

    return types.intp(*[types.intp] * 4), code


def symbol(name):
    """A function that gives the address which `llvmlite.binding.add_symbol` knows by a name.

    Code on disk holds the name, not the address, which is another in each process.
    """

    @intrinsic
    def address(typing):
        def code(context, builder, signature, args):
            byte = ir.IntType(8)
            known = builder.module.globals.get(name)
            known = known or ir.GlobalVariable(builder.module, byte, name)
            return builder.ptrtoint(known, ir.IntType(64))

        return types.intp(), code

    return address

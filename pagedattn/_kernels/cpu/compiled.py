"""The kernel as machine code: C functions, compiled when first needed, and kept on disk.

Where Numba finds no folder that it may write to, they are compiled in each process. The key on disk
has the CPU, the versions of Numba and of Python, and `sources()`, since Numba itself looks only at
the file of the function that is called.
"""

import contextlib
import functools
import gc
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import binding
from numba import cfunc, types

from ...cache.quantise import LARGEST
from . import workers
from .call_args import args_at, work_item_at
from .compiling import MODE
from .dtypes import DTYPES, Dtype
from .prefill import tile
from .prefill.micro_kernel import micro_kernel

PAIRS_OF_DTYPES = [(dtype, dtype) for dtype in DTYPES if dtype not in LARGEST]
PAIRS_OF_DTYPES += [(dtype, held) for held in LARGEST for dtype in ("bfloat16", "float32")]
CODES = {dtypes: code for code, dtypes in enumerate(PAIRS_OF_DTYPES)}
TASKS = "pagedattn_tasks"  # the symbol by which machine code finds the addresses of `task`s,
PREFILLS = len(CODES)  # and behind these, those of `prefill`s
_tasks = np.zeros(2 * len(CODES), np.intp)
binding.add_symbol(TASKS, _tasks.ctypes.data)
NUMBER, NOTHING = types.intp, types.void


def machine_code(signature, function: Callable, name: str) -> Any:
    """A C function. What a closure holds is part of its key on disk: let it hold `sources()`.

    The functions below do so by comparing an address with it, which is never equal. On disk, Numba
    counts the functions of a name, and two processes may count alike: so each has its own name.
    """
    function.__qualname__ = name
    with _no_collections():
        try:
            return cfunc(signature, cache=True, **MODE)(function)
        except RuntimeError:  # no folder to write to
            return cfunc(signature, **MODE)(function)


@contextlib.contextmanager
def _no_collections():
    """Numba makes millions of objects: looking for cycles among them takes a sixth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@functools.cache
def sources() -> int:
    """A number that changes with any of the sources that are compiled."""
    package = Path(__file__).parents[2]
    folders = package / "_kernels/cpu", package / "backends/numba"
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    return _number(b"".join(file.read_bytes() for file in files))


def _number(text: bytes) -> int:
    return int(hashlib.sha256(text).hexdigest()[:12], 16)


def _version(dtypes: tuple[Dtype, Dtype]) -> int:
    """That of the sources, and of how this machine multiplies."""
    return _number(f"{sources()} {micro_kernel(*dtypes)}".encode())


@functools.cache
def task(dtype: str, cache_dtype: str):
    """`void task(args)`: works on a call as long as there is work.

    Query and out are of the cache's dtype, or of bfloat16 or float32 where that has eight bits.
    """
    dtypes = DTYPES[dtype], DTYPES[cache_dtype]
    version = _version(dtypes)

    def task(args):
        if args != version:
            workers.work(args, dtypes)
            workers.leave(args)

    compiled = machine_code(NOTHING(NUMBER), task, f"task_{dtype}_{cache_dtype}")
    _tasks[CODES[dtype, cache_dtype]] = compiled.address
    return compiled


@functools.cache
def prefill(dtype: str, cache_dtype: str):
    """`void prefill(args, item, scratch)`: computes a work item of a long sequence."""
    dtypes = DTYPES[dtype], DTYPES[cache_dtype]
    version = _version(dtypes)

    def prefill(args, item, scratch):
        if args != version:
            tile.attend_tile(args_at(args), dtypes, work_item_at(item), scratch)

    signature, name = NOTHING(NUMBER, NUMBER, NUMBER), f"prefill_{dtype}_{cache_dtype}"
    compiled = machine_code(signature, prefill, name)
    _tasks[PREFILLS + CODES[dtype, cache_dtype]] = compiled.address
    return compiled

"""The handlers as machine code, under the names by which XLA finds them.

Each compares the frame's address with `version`, which it never is: so the closure holds the number
of the sources, by which Numba finds out that code on disk is of other ones (`compiled.py`).
"""

import functools

import jax
from numba import types

from ...kernels.cpu.compiled import machine_code, sources, task
from . import handlers

ATTENTION, SET_ROWS = "pagedattn_numba_attention", "pagedattn_numba_set_rows"


def register_kernel(dtype: str, cache_dtype: str) -> None:
    """Compiles the kernel for dtypes of query and cache, or takes it from disk."""
    task(dtype, cache_dtype)
    register_attention()


@functools.cache
def register_attention() -> None:
    version = sources()

    def attention(frame):
        return handlers.attention(frame) if frame != version else 0

    _register(ATTENTION, attention)


@functools.cache
def register_set_rows() -> None:
    version = sources()

    def set_rows(frame):
        return handlers.set_rows(frame) if frame != version else 0

    _register(SET_ROWS, set_rows)


def _register(name, function):
    code = machine_code(types.intp(types.intp), function)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(code.address), platform="cpu")

"""The handlers as machine code, under the names by which XLA finds them.

Each compares the frame's address with `version`, which it never is: so the closure holds the number
of the sources, by which Numba finds out that code on disk is of other ones (`compiled.py`).
"""

import jax
from numba import types

from ..._kernels.cpu.compiled import CODES, choose, machine_code, score, sources, task
from ..._kernels.cpu.compiling import once
from . import handlers

SET_ROWS = "pagedattn_numba_set_rows"
CHOOSE_BEST = "pagedattn_numba_choose_best"


@once
def register_attention(*names: str) -> str:
    """The target for dtypes of query and cache, as `task` takes them, compiled or taken from disk.

    Each pair has a name of its own: a program that was compiled elsewhere and loaded here does not
    run before this process has registered just what it calls.
    """
    task(*names)
    version, code = sources(), CODES[names]

    def attention(frame):
        return handlers.attention(frame, code) if frame != version else 0

    name = "_".join(["pagedattn_numba_attention", *names]).replace(" ", "_")
    _register(name, attention)
    return name


@once
def register_scores(query: str, held: str) -> str:
    """The target for scores of blocks by queries and summaries of two dtypes."""
    score(query, held)
    version, code = sources(), CODES[query, held]

    def scores(frame):
        return handlers.scores(frame, code) if frame != version else 0

    name = f"pagedattn_numba_scores_{query}_{held}"
    _register(name, scores)
    return name


@once
def register_set_rows() -> None:
    version = sources()

    def set_rows(frame):
        return handlers.set_rows(frame) if frame != version else 0

    _register(SET_ROWS, set_rows)


@once
def register_choice() -> None:
    choose()
    version = sources()

    def choose_best(frame):
        return handlers.choose_best(frame) if frame != version else 0

    _register(CHOOSE_BEST, choose_best)


def _register(name, function):
    code = machine_code(types.intp(types.intp), function, name)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(code.address), platform="cpu")

"""The kernel as machine code: C functions, compiled when first needed, and kept on disk.

Where Numba finds no folder that it may write to, they are compiled in each process. The key on disk
has the CPU, the versions of Numba and of Python, and `sources()`, since Numba itself looks only at
the file of the function that is called.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import binding
from numba import cfunc, types

from ...cache.packing import PACKED
from ...cache.quantise import LARGEST
from . import block_choice, block_scores, workers
from .bf16_dot import are_pairs
from .call_args import args_at
from .compiling import MODE, once
from .compiling_faster import compiling_faster
from .dtypes import BFLOAT16, DTYPES, FLOAT16, FLOAT32, INT4, TOKENS, Dtype
from .prefill import tile
from .prefill.micro_kernel import micro_kernel

HELD: list[tuple[str, ...]] = [(dtype.name, dtype.name) for dtype in (BFLOAT16, FLOAT16, FLOAT32)]
HELD += [(dtype, held) for held in LARGEST for dtype in ("bfloat16", "float32")]
HELD += [
    (dtype, held, TOKENS.name) for held in (*LARGEST, *PACKED) for dtype in ("bfloat16", "float32")
]
CODES = {held: code for code, held in enumerate(HELD)}
TASKS = "pagedattn_tasks"  # the symbol by which machine code finds the addresses of `task`s,
PREFILLS = len(CODES)  # behind these, those of `prefill`s,
SCORES = 2 * len(CODES)  # those of `score`s,
CHOICE = 3 * len(CODES)  # and that of `choose`
_tasks = np.zeros(CHOICE + 1, np.intp)
binding.add_symbol(TASKS, _tasks.ctypes.data)
NUMBER, NOTHING = types.intp, types.void


def machine_code(signature, function: Callable, name: str) -> Any:
    """A C function. What a closure holds is part of its key on disk: let it hold `sources()`.

    The functions below do so by comparing an address with it, which is never equal. On disk, Numba
    counts the functions of a name, and two processes may count alike: so each has its own name.
    """
    function.__qualname__ = name
    with compiling_faster():
        try:
            return cfunc(signature, cache=True, **MODE)(function)
        except RuntimeError:  # no folder to write to
            return cfunc(signature, **MODE)(function)


@functools.cache
def sources() -> int:
    """A number that changes with any of the sources that are compiled."""
    package = Path(__file__).parents[2]
    folders = package / "_kernels/cpu", package / "backends/numba"
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    return _number(b"".join(file.read_bytes() for file in files))


def _number(text: bytes) -> int:
    return int(hashlib.sha256(text).hexdigest()[:12], 16)


def multiplied(*held: Dtype) -> tuple[tuple[Dtype, Dtype], tuple[Dtype, Dtype]]:
    """The dtypes of the rows that short queries read, and of those that tiles of long ones do.

    Rows with per-token scales become rows of the query's dtype for tiles, those of four bits for
    all that does not multiply them as they are held.
    """
    query, cache = held[:2]
    own = query, query
    return own if cache == INT4 else (query, cache), own if TOKENS in held else (query, cache)


def _version(products: object) -> int:
    """That of the sources, and of how this machine multiplies."""
    return _number(f"{sources()} {products}".encode())


@once
def task(*names: str):
    """`void task(args)`: works on a call as long as there is work.

    Query and out are of the cache's dtype, or of bfloat16 or float32 where that is quantised; a
    third name says that it has per-token scales.
    """
    held = tuple(DTYPES[name] for name in names)
    dtypes, tiles = multiplied(*held)
    version = _version((are_pairs(*dtypes), micro_kernel(*tiles)))

    def task(args):
        if args != version:
            workers.work(args, dtypes, tiles, held)
            workers.leave(args)

    compiled = machine_code(NOTHING(NUMBER), task, _name("task", names))
    _tasks[CODES[names]] = compiled.address
    return compiled


@once
def prefill(*names: str):
    """`void prefill(args, item, scratch)`: computes a work item of a long sequence."""
    held = tuple(DTYPES[name] for name in names)
    _, tiles = multiplied(*held)
    version = _version(micro_kernel(*tiles))

    def prefill(args, item, scratch):
        if args != version:
            tile.attend_tile(args_at(args), tiles, held, item, scratch)

    signature = NOTHING(NUMBER, NUMBER, NUMBER)
    compiled = machine_code(signature, prefill, _name("prefill", names))
    _tasks[PREFILLS + CODES[names]] = compiled.address
    return compiled


@once
def score(query: str, held: str):
    """`void score(args)`: works on scores of blocks as long as there is work."""
    dtypes = DTYPES[query], DTYPES[held]
    version = _version(are_pairs(*dtypes))

    def score(args):
        if args != version:
            block_scores.work_on_scores(args, dtypes)
            workers.leave(args)

    compiled = machine_code(NOTHING(NUMBER), score, _name("score", (query, held)))
    _tasks[SCORES + CODES[query, held]] = compiled.address
    return compiled


@once
def choose():
    """`void choose(args)`: works on the choice of blocks as long as there is work."""
    version = sources()

    def choose(args):
        if args != version:
            block_choice.work_on_choice(args)
            workers.leave(args)

    compiled = machine_code(NOTHING(NUMBER), choose, "choose")
    _tasks[CHOICE] = compiled.address
    return compiled


def _name(function: str, names: tuple[str, ...]) -> str:
    return "_".join([function, *names]).replace(" ", "_")

"""Holds a backend to the oracle: every feature in every phase and dtype."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import ml_dtypes  # noqa: F401  (teaches NumPy the name bfloat16)
import numpy as np

from .. import Backend, UnsupportedError
from .._arrays.inspect import describe
from .._arrays.namespace import cdiv
from . import features
from .closeness import assert_attention_close
from .features import DTYPES, OPTIONS, PHASES, arrays_of, spec_of
from .problem import Problem
from .random_problems import random_problem, random_tables
from .running import attend_with_lse

NUM_TOKENS, NUM_SEQS, MAX_SEQ_LEN, MAX_QUERY_LEN = 26, 5, 40, 32


class Cell(NamedTuple):
    """One combination and its result: "ok", "refused: ..." or "FAILED: ..."."""

    feature: str
    phase: str
    dtype: str
    result: str


def check_backend(
    backend: str | Backend,
    *,
    dtypes: Sequence[str] = DTYPES,
    jit: bool = False,
    batch_invariant: bool = False,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    verbose: bool = True,
) -> list[Cell]:
    """Run a backend over feature x phase x dtype and compare every cell with the oracle.

    A cell passes if its results have the shapes and dtypes of the call and match the oracle under
    the precision rule, with NaN in every slot that no query may see, or if it raises
    `UnsupportedError` and the reason has one of the cell's words: the feature, the phase, the
    dtype or a size. A backend that cannot give lse is run again without it.

    Args:
        backend: one of `available_backends()` by name, or any `Backend` for JAX arrays.
        dtypes: input dtypes to try.
        jit: call inside `jax.jit`.
        batch_invariant: ask for it in every call, as in `paged_attention`.
        num_heads, num_kv_heads, head_dim, block_size: sizes of the problems.
        verbose: print the table, and how many results there are of each kind.

    Returns:
        One `Cell` for each combination.

    Raises:
        AssertionError: listing the cells that failed, or that all were refused.
        BackendUnavailableError: if the backend cannot be loaded here.

    Example:
        >>> from pagedattn.testing import check_backend
        >>> cells = check_backend("xla", dtypes=["float32"], jit=True, verbose=False)
        >>> {cell.result for cell in cells}
        {'ok'}
    """
    sizes = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "block_size": block_size,
    }
    cells = [
        Cell(feature, phase, str(np.dtype(dtype)), "")
        for feature in OPTIONS
        for phase in PHASES
        for dtype in dtypes
    ]
    options = {"jit": jit, "batch_invariant": batch_invariant, "sizes": sizes}
    cells = [cell._replace(result=run_cell(backend, cell, **options)) for cell in cells]
    if verbose:
        print(table(str(backend), cells), counts(cells), sep="\n")
    raise_on_failures(str(backend), cells)
    return cells


def cell_problem(cell: Cell, sizes: dict[str, int]) -> Problem:
    """The problem of a cell, padded so that all cells of a feature share few programs."""
    lens = PHASES[cell.phase] + ((0, 0),) * (NUM_SEQS - len(PHASES[cell.phase]))
    query_lens, seq_lens = zip(*lens, strict=True)
    spec = spec_of(cell.feature, sizes["num_heads"])
    blocks = [cdiv(n, sizes["block_size"]) for n in seq_lens]
    width = cdiv(MAX_SEQ_LEN, sizes["block_size"])
    num_blocks = NUM_SEQS * width + 1  # one that no sequence has
    rows = random_tables(np.random.default_rng(0), blocks, num_blocks)
    return random_problem(
        query_lens,
        seq_lens,
        spec,
        **sizes,
        num_blocks=num_blocks,
        block_tables=[row + [-1] * (width - len(row)) for row in rows],
        pad_tokens=NUM_TOKENS,
        dtype=np.dtype(cell.dtype),
        max_query_len=1 if cell.phase == "decode" else MAX_QUERY_LEN,
        arrays=arrays_of(cell.feature),
        **features.kinds_of(cell.feature),
    )


def run_cell(
    backend: str | Backend,
    cell: Cell,
    *,
    jit: bool,
    sizes: dict[str, int],
    batch_invariant: bool = False,
) -> str:
    """The result of one cell, as `Cell.result` holds it."""
    problem = cell_problem(cell, sizes)
    held = with_shapes_held(backend) if isinstance(backend, Backend) else backend
    try:
        out, lse = attend_with_lse(problem, held, jit, batch_invariant=batch_invariant)
        hold_shapes((out, lse), problem.out_shape, str(problem.query.dtype))
        assert_attention_close(out, lse, problem, name=str(backend))
    except UnsupportedError as error:
        allowed = words(cell) + ["batch_invariant"] * batch_invariant
        if any(word in str(error) for word in allowed):
            return f"refused: {error}"
        allowed = ", ".join(allowed)
        return f"FAILED: the reason names no feature of the cell, one of {allowed}: {error}"
    except AssertionError as error:
        return f"FAILED: {error}"
    return "ok"


def with_shapes_held(backend: Backend) -> Backend:
    """The backend, whose results are held to the call before anything is computed of them."""

    def run(call, *arrays, **options):
        results = backend.run(call, *arrays, **options)
        hold_shapes(results, call.out_shape, call.dtype)
        return results

    return replace(backend, run=run)


def hold_shapes(results, out_shape: tuple[int, ...], dtype: str) -> None:
    """Raise AssertionError unless results are out and lse (or None) of these shapes and dtypes."""
    pair = isinstance(results, tuple) and len(results) == 2
    if not pair:
        raise AssertionError(f"run must return (out, lse), got {type(results).__name__}")
    expected = f"{dtype}{list(out_shape)}", f"float32{list(out_shape[:2])}"
    for name, array, want in zip(("out", "lse"), results, expected, strict=True):
        got = "None" if array is None else describe(array)
        if got != want and (name, got) != ("lse", "None"):
            raise AssertionError(f"{name} must be {want}, got {got}")


def words(cell: Cell) -> list[str]:
    """Words of which the reason for refusing a cell must hold at least one."""
    sizes = ["num_heads", "num_kv_heads", "head_dim", "block_size"]
    return [*OPTIONS[cell.feature], *cell.phase.split(), cell.dtype, *sizes]


def table(name: str, cells: Sequence[Cell]) -> str:
    """The cells as aligned text."""
    widths = [max(len(str(cell[i])) for cell in cells) for i in range(3)]
    lines = [
        "  ".join(str(cell[i]).ljust(widths[i]) for i in range(3)) + f"  {cell.result}"
        for cell in cells
    ]
    return "\n".join([f"backend {name}", *lines])


def counts(cells: Sequence[Cell]) -> str:
    """How many results there are of each kind: "360 ok, 16 refused, 0 FAILED"."""
    found = Counter(cell.result.partition(":")[0] for cell in cells)
    return ", ".join(f"{found[kind]} {kind}" for kind in ("ok", "refused", "FAILED"))


def raise_on_failures(name: str, cells: Sequence[Cell]) -> None:
    """Raise AssertionError if a cell failed, or if none ran."""
    failed = [cell for cell in cells if cell.result.startswith("FAILED")]
    if failed:
        count = f"{len(failed)} of {len(cells)} cells"
        raise AssertionError(f"{count} failed:\n{table(name, failed)}")
    if not any(cell.result == "ok" for cell in cells):
        raise AssertionError(f"backend {name} refused every cell:\n{table(name, cells)}")

"""The cells of the scoreboard: an option, and a phase or a type of attention."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from pagedattn import AttentionSpec
from pagedattn.testing import Problem, random_problem
from pagedattn.testing.strategies import Options, options_table

# Sizes that every peer takes: heads of 128, and pages of 32, which some processors' kernels want.
SIZES = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "block_size": 32}
LATENT = {"num_heads": 16, "num_kv_heads": 1, "head_dim": 576}
LATENT_VALUES, FEWER_VALUES = 512, 64


class Column(NamedTuple):
    """A phase of a decoder, or another type of attention: its (query_len, key_len)."""

    lengths: tuple[tuple[int, int], ...]
    causal: bool = True


COLUMNS = {
    "prefill": Column(((5, 5), (70, 70), (1, 1))),
    "chunked prefill": Column(((6, 131), (40, 100), (2, 33))),
    "decode": Column(((1, 1), (1, 64), (1, 65), (1, 200))),
    "mixed": Column(((7, 7), (1, 133), (40, 130), (1, 1))),
    "encoder": Column(((9, 9), (70, 70), (1, 1)), causal=False),
    "cross": Column(((6, 111), (1, 30), (14, 5)), causal=False),
}
# Rows beside those of the options: what else differs from a plain call.
OTHERS: dict[str, dict[str, Any]] = {
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
    "lse": {},
    "NaN in unused slots": {"poison": np.nan},
    "a sequence without new tokens": {},
}
LONGER = 300  # keys of the sequence without new tokens


class Cell(NamedTuple):
    row: str
    column: str


def rows() -> dict[str, Options]:
    """The options by their names in the library's own table, and the other rows.

    Causality is a matter of the columns, and edges of one option are left to the library's tests.
    """
    table = options_table(SIZES["num_heads"])
    spec = AttentionSpec()
    named = {
        name: options
        for name, options in table.items()
        if options.spec.causal and not name.startswith(("sliding_window=", "standard "))
    }
    return named | dict.fromkeys(OTHERS, Options(spec))


def cells() -> list[Cell]:
    """Every row in every column; drafts that branch in those that are causal."""
    return [
        Cell(name, column)
        for name, options in rows().items()
        for column in COLUMNS
        if COLUMNS[column].causal or "parents" not in (options.cache or {})
    ]


def needs(cell: Cell) -> list[str]:
    """What a peer must have for a cell: options by their names, and words for what else."""
    options, causal = rows()[cell.row], COLUMNS[cell.column].causal
    default = AttentionSpec()
    named = [
        field.name
        for field in dataclasses.fields(options.spec)
        if getattr(options.spec, field.name) != getattr(default, field.name)
    ]
    cache = [name for name in options.cache or {} if name != "value_dim" or not _latent(options)]
    other = [cell.row] if cell.row in ("float16", "float32", "lse") else []
    return [*named, *options.arrays, *cache, *other, *([] if causal else ["causal=False"])]


def _latent(options: Options) -> bool:
    return "latent" in (options.cache or {})


def problem_of(cell: Cell) -> Problem:
    """The call of a cell, in bfloat16 unless it is about another dtype, without padding."""
    options, column = rows()[cell.row], COLUMNS[cell.column]
    sizes, cache = dict(SIZES), dict(options.cache or {})
    if _latent(options):
        sizes |= LATENT
    if "value_dim" in cache:
        cache["value_dim"] = LATENT_VALUES if _latent(options) else FEWER_VALUES
    lengths = [*column.lengths]
    if cell.row == "a sequence without new tokens":
        lengths.insert(1, (0, LONGER))
    query_lens, seq_lens = zip(*lengths, strict=True)
    other: dict[str, Any] = {"dtype": "bfloat16", "poison": None} | OTHERS.get(cell.row, {})
    other["dtype"] = np.dtype(other["dtype"])
    spec = _of_heads(options.spec, sizes["num_heads"], column.causal)
    problem = random_problem(
        query_lens, seq_lens, spec, arrays=options.arrays, **sizes, **cache, **other
    )
    return _as_peers_take_it(problem)


def _of_heads(spec: AttentionSpec, num_heads: int, causal: bool) -> AttentionSpec:
    slopes = spec.alibi_slopes
    slopes = slopes and tuple(np.resize(slopes, num_heads).tolist())
    return dataclasses.replace(spec, alibi_slopes=slopes, causal=causal)


def _as_peers_take_it(problem: Problem) -> Problem:
    """With a bias and sinks that the query's dtype holds, and one scale for each plane.

    The scales are powers of two: a peer that quantises by itself finds the same numbers.
    """
    if problem.bias is not None:
        problem = problem.replace(bias=problem.bias.astype(problem.query.dtype))
    if problem.sinks is not None:
        held = problem.sinks.astype(problem.query.dtype)
        problem = problem.replace(sinks=held.astype(np.float32))
    for name, scale in {"key_scale": 0.25, "value_scale": 0.5}.items():
        given = getattr(problem, name)
        if given is not None and np.ndim(given) <= 1:
            problem = problem.replace(**{name: np.float32(scale)})
    return problem

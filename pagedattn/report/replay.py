"""A recorded call, run by every backend: right or not, and how long it takes."""

import dataclasses
import functools
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._dispatch import registry
from ..attention import explain
from ..errors import UnsupportedError
from ..testing.closeness import assert_attention_close
from ..testing.problem import Problem
from ..testing.recorded import Recorded, read_record
from ..testing.running import attend_in_jit, batch_of, cache_of, numpy_cache
from ..testing.tolerances import Expected, expect
from .usable import on_torch, plain_decode

ENOUGH = 0.3  # seconds of calls of each backend
MOST_CALLS = 100
JUDGED = 1 << 32  # products of a query element and a key element that the oracle computes, about


class Row(NamedTuple):
    """What became of the call by one backend.

    Fields:
      result: "right", "wrong: ...", "refused: ..." or "failed: ...".
      microseconds: the median of some calls; None where none ran.
    """

    backend: str
    result: str
    microseconds: float | None = None


def replay(file: str | PathLike) -> dict[str, Any]:
    """The rows of all backends for the call of a file, and what the file says of it.

    Raises:
      InvalidInputError: it is no file of `pagedattn.testing.record`.
    """
    kept = read_record(file)
    told = {name: about for name, about in kept.told.items() if name != "arrays"}
    told["arrays"] = {
        name: {fact: value for fact, value in about.items() if fact != "values"}
        for name, about in kept.told["arrays"].items()
    }
    judge = Judge(kept.problem)
    runs = BY_FRAMEWORK[kept.framework](kept)
    rows = [_row(name, run, judge) for name, run in runs.items()]
    return {"recorded": told, "rows": [row._asdict() for row in rows]}


def wrong(found: dict[str, Any]) -> bool:
    """Whether a backend computed something else, or ended by an error that is no refusal."""
    return any(row["result"].startswith(("wrong", "failed")) for row in found["rows"])


Run = Callable[[], Any]  # a call whose results are ready


def _row(name: str, run: Run | list[str], judge: "Judge") -> Row:
    if isinstance(run, list):
        return Row(name, f"refused: {'; '.join(run)}")
    try:
        results = run()
        judge(name, results)
        return Row(name, "right", _microseconds(run))
    except UnsupportedError as error:
        return Row(name, f"refused: {error}")
    except AssertionError as error:
        return Row(name, f"wrong: {error}", _microseconds(run))
    except Exception as error:  # a kernel can raise anything; the other backends still run
        return Row(name, f"failed: {type(error).__name__}: {error}")


def _microseconds(run: Run) -> float:
    """The median of calls that are waited for one by one; the first was made before."""
    calls = int(min(MOST_CALLS, max(3, ENOUGH / max(1e-6, _seconds(run)))))
    return round(1e6 * statistics.median(_seconds(run) for _ in range(calls)), 1)


def _seconds(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Judge:
    """Holds results to the oracle: all, or of large calls the last queries of each sequence."""

    def __init__(self, problem: Problem):
        each = sum(map(int, problem.seq_lens)) * problem.query.shape[1] * problem.query.shape[2]
        judged, self.rows = last_queries(problem, max(1, JUDGED // max(1, each)))
        self.expected: Expected = expect(judged)

    def __call__(self, name: str, results: tuple[Any, Any]) -> None:
        out, lse = (None if x is None else _as_numpy(x)[self.rows] for x in results)
        assert_attention_close(out, lse, self.expected, name=name)


def last_queries(problem: Problem, most: int) -> tuple[Problem, np.ndarray]:
    """The problem of at most so many last queries of each sequence, and which rows they are.

    A query's position follows from the end of its sequence, so theirs are the same. Where drafts
    branch it is the whole problem: in a context the lines of descent would be lost.
    """
    if problem.parents is not None:
        return problem, np.arange(len(problem.query))
    stops = problem.query_start_loc[1:]
    lens = [min(most, int(n)) for n in problem.query_lens]
    rows = [np.arange(stop - n, stop) for stop, n in zip(stops, lens, strict=True)]
    padding = np.arange(problem.query_start_loc[-1], len(problem.query))
    chosen = np.concatenate([*rows, padding]).astype(int)
    bias = None if problem.bias is None else problem.bias[chosen]
    return problem.replace(query=problem.query[chosen], query_lens=lens, bias=bias), chosen


def _as_numpy(array) -> np.ndarray:
    array = array.detach().cpu().double() if hasattr(array, "detach") else array
    return np.asarray(array)


def _by_jax(kept: Recorded) -> dict[str, Run | list[str]]:
    """The call by each backend for JAX arrays, or why it refuses it."""
    problem, options = kept.problem, _options(kept)
    arrays = jnp.asarray(problem.query), cache_of(problem), batch_of(problem), problem.spec
    given: dict[str, Any] = jax.tree.map(jnp.asarray, problem.arrays)

    def run(name):
        results = attend_in_jit(*arrays, backend=name, **options, **given)
        return _pair(jax.block_until_ready(results), kept.return_lse)

    return _runs(explain(*arrays, **options, **given), run)


def _by_torch(kept: Recorded) -> dict[str, Run | list[str]]:
    """The call by each backend for torch tensors, which lie as those of the record did."""
    registry.load("sdpa", registry.Framework.TORCH)  # where torch is missing, it says so
    torch_side = importlib.import_module("pagedattn_torch")  # by name: the core imports no torch
    torch, device = sys.modules["torch"], on_torch(plain_decode()).device
    problem, options = kept.problem, _options(kept)

    def tensor(name, array):
        dtype = getattr(torch, str(array.dtype))
        flat = torch.from_numpy(np.ravel(array).view(np.uint8)).view(dtype)
        dense = flat.reshape(array.shape).to(device)
        if name not in kept.strides:
            return dense
        lying = kept.strides[name]
        return torch.empty_strided(dense.shape, lying, dtype=dtype, device=device).copy_(dense)

    cache = numpy_cache(problem)
    held = {n: x for n, x in vars(cache).items() if isinstance(x, np.ndarray)}
    cache = dataclasses.replace(cache, **{name: tensor(name, x) for name, x in held.items()})
    arrays = tensor("query", problem.query), cache, batch_of(problem), problem.spec
    given: dict[str, Any] = {
        name: jax.tree.map(functools.partial(tensor, name), array)
        for name, array in problem.arrays.items()
    }

    def run(name):
        results = torch_side.paged_attention(*arrays, backend=name, **options, **given)
        if device != "cpu":
            getattr(torch, device).synchronize()
        return _pair(results, kept.return_lse)

    return _runs(torch_side.explain(*arrays, **options, **given), run)


BY_FRAMEWORK = {"jax": _by_jax, "torch": _by_torch}


def _runs(
    explanation: dict[str, list[str]], run: Callable[[str], Any]
) -> dict[str, Run | list[str]]:
    """What runs each backend, or its reasons."""
    return {n: why or functools.partial(run, n) for n, why in explanation.items()}


def _pair(results, with_lse: bool) -> tuple[Any, Any]:
    return results if with_lse else (results, None)


def _options(kept: Recorded) -> dict[str, Any]:
    return {"return_lse": kept.return_lse, "batch_invariant": kept.batch_invariant}

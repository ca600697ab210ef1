"""A recorded call, as a problem again."""

import base64
import json
import zlib
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (teaches NumPy the name bfloat16)
import numpy as np

from .._arrays.inspect import is_floating
from .._arrays.namespace import cdiv
from .._dispatch import validate
from .._dispatch.options import validate_arrays, validate_fit
from ..errors import InvalidInputError
from ..spec import AttentionSpec
from . import features
from .problem import Problem
from .record import FORMAT
from .running import PLANES, batch_of, numpy_cache


class Recorded(NamedTuple):
    """A recorded call.

    Fields:
        problem: its arrays; where no values were kept random ones, and NaN in all slots that no
            sequence has.
        framework: whose arrays they were, "jax" or "torch".
        backend: the backend that the call named, or None.
        return_lse, batch_invariant: as in the call.
        strides: those of tensors that were not contiguous, by the name of the array.
        told: the whole file.
    """

    problem: Problem
    framework: str
    backend: str | None
    return_lse: bool
    batch_invariant: bool
    strides: dict[str, tuple[int, ...]]
    told: dict[str, Any]


def read_record(file: str | PathLike, *, seed: int = 0) -> Recorded:
    """The call that a file of `record` describes.

    Args:
        file: which one.
        seed: of the random values, where the file has none.

    Raises:
        InvalidInputError: it cannot be read, has another format, or was changed to something that
            describes no call.

    Example:
        >>> import pathlib, tempfile
        >>> from pagedattn import AttentionSpec
        >>> from pagedattn.testing import batch_of, cache_of, random_problem, record
        >>> problem = random_problem([1, 3], [9, 3], AttentionSpec())
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "call.json"
        >>> record(file, problem.query, cache_of(problem), batch_of(problem))
        >>> read_record(file).problem.query.shape
        (4, 4, 16)
    """
    told = _json(file)
    if told.get("format") != FORMAT:
        raise InvalidInputError(
            f"{file} must be a call of format {FORMAT}, got {told.get('format')!r}: replay it with "
            "the version of pagedattn that wrote it, or record it again"
        )
    try:
        return _recorded(told, np.random.default_rng(seed))
    except Exception as error:  # whatever a changed file leads to
        raise InvalidInputError(
            f"{file} must be as pagedattn.testing.record writes it, but it describes no call "
            f"({type(error).__name__}: {error}): record it again"
        ) from error


def _json(file) -> dict[str, Any]:
    try:
        told = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"{file} must be JSON that pagedattn.testing.record wrote: {error}"
        ) from error
    return told if isinstance(told, dict) else {}


def _recorded(told: dict[str, Any], rng: np.random.Generator) -> Recorded:
    options, arrays = told["options"], told["arrays"]
    if told["framework"] not in ("jax", "torch"):
        raise ValueError(f"its framework is {told['framework']!r}")
    if not isinstance(options["backend"], str | None):
        raise ValueError(f"its backend is {options['backend']!r}")
    problem = _problem(told, rng)
    _require_a_call(problem)
    return Recorded(
        problem=problem,
        framework=told["framework"],
        backend=options["backend"],
        return_lse=_flag(options["return_lse"]),
        batch_invariant=_flag(options["batch_invariant"]),
        strides={n: tuple(map(int, f["strides"])) for n, f in arrays.items() if "strides" in f},
        told=told,
    )


def _require_a_call(problem: Problem) -> None:
    query, cache, batch = problem.query, numpy_cache(problem), batch_of(problem)
    validate.attention(query, cache, batch, problem.spec, False)
    validate_arrays(problem.arrays, query)
    validate_fit(problem.arrays, cache, batch)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"a flag is {value!r}")
    return value


def _problem(told: dict[str, Any], rng: np.random.Generator) -> Problem:
    batch, facts = told["batch"], told["arrays"]
    spec = AttentionSpec(**told["spec"])
    num_blocks, block_size = facts["key"]["shape"][:2]
    if block_size != batch["block_size"]:
        raise ValueError(f"blocks of {block_size} and of {batch['block_size']}")
    tables = _tables(batch, num_blocks, rng)
    held = _owned(tables, batch["seq_lens"], num_blocks, block_size)
    arrays = {}
    for name, about in facts.items():
        field = PLANES.get(name, name)
        arrays[field] = _kept(about) if "values" in about else _random(rng, name, about, held)
    arrays.setdefault("value_cache", None)
    lens = {name: list(batch[name]) for name in ("query_lens", "seq_lens")}
    lens["max_query_len"] = batch["max_query_len"]
    if "parents" in batch:
        arrays["parents"] = np.asarray(batch["parents"], int)
    return Problem(block_tables=tables, spec=spec, **lens, **told["cache"], **arrays)


def _tables(batch: dict[str, Any], num_blocks: int, rng: np.random.Generator) -> np.ndarray:
    """Those that were kept, or shuffled blocks; shared ones where there are too few."""
    if "block_tables" in batch:
        return np.asarray(batch["block_tables"], np.int32).reshape(-1, batch["max_blocks"])
    counts = [cdiv(n, batch["block_size"]) for n in batch["seq_lens"]]
    ids = np.resize(rng.permutation(num_blocks), sum(counts))
    tables = np.full((len(counts), batch["max_blocks"]), -1, np.int32)
    for row, count, stop in zip(tables, counts, np.cumsum(counts), strict=True):
        row[:count] = ids[stop - count : stop]
    return tables


def _owned(tables, seq_lens, num_blocks: int, block_size: int) -> np.ndarray:
    """bool `[num_blocks, block_size]`: slots that hold a key of a sequence."""
    owned = np.zeros((num_blocks, block_size), bool)
    for row, seq_len in zip(tables, seq_lens, strict=True):
        keys = np.arange(seq_len)
        blocks = row[keys // block_size]
        inside = blocks >= 0  # tables that were kept have none where a window hides the block
        owned[blocks[inside], (keys % block_size)[inside]] = True
    return owned


def _kept(about: dict[str, Any]) -> np.ndarray:
    values = zlib.decompress(base64.b64decode(about["values"]))
    return np.frombuffer(values, np.dtype(about["dtype"])).reshape(about["shape"]).copy()


def _random(rng, name: str, about: dict[str, Any], owned: np.ndarray) -> np.ndarray:
    """Random values; of planes only where a sequence has a key."""
    dtype, shape = np.dtype(about["dtype"]), tuple(about["shape"])
    if name in PLANES:
        plane = np.full(shape, np.nan if is_floating(dtype) else np.iinfo(dtype).min, dtype)
        plane[owned] = _numbers(rng, (int(owned.sum()), *shape[2:]), dtype)
        return plane
    if name.endswith("_scale"):
        return rng.uniform(0.01, 0.02, shape).astype(dtype)
    array = _numbers(rng, shape, np.dtype(np.float32))
    if name in features.ARRAYS:
        features.ARRAYS[name].fill(rng, array)
    return array.astype(dtype)


def _numbers(rng, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Unit normal numbers, larger ones in eight bits, which small scales go with; or any bits."""
    if not is_floating(dtype):
        return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    size = 1 if dtype.itemsize > 1 else 70
    return (size * rng.standard_normal(shape, np.float32)).astype(dtype)

"""A call recorded as JSON: what a report of it needs, its values only when asked for."""

import base64
import dataclasses
import json
import zlib
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from .._arrays.devices import is_dense, strides_of
from .._arrays.dlpack import takes_any_array
from .._arrays.inspect import dtype_name
from .._arrays.memory import require_memory
from .._arrays.typing import is_torch
from .._dispatch import select, validate
from .._dispatch.backend import Backend
from .._dispatch.call import call_of
from .._dispatch.options import given_of, validate_arrays, validate_fit
from .._dispatch.registry import Framework
from ..batch.metadata import BatchMetadata
from ..cache.kv_cache import KVCache
from ..errors import InvalidInputError
from ..report import machine
from ..spec import AttentionSpec

FORMAT = 1  # changes with the meaning of a field: a file of another one is refused


def record(
    file: str | PathLike,
    query: Any,
    cache: KVCache,
    batch: BatchMetadata,
    spec: AttentionSpec = AttentionSpec(),
    *,
    values: bool = False,
    backend: str | Backend | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    **arrays: Any,
) -> None:
    """Write down a call of `paged_attention`, for `python -m pagedattn --replay FILE`.

    The file has the shapes, dtypes and, of tensors, unusual strides of all arrays, the lengths, the
    parents of draft trees, the spec and the options, what `explain` says, and the versions
    and devices of this machine. It has no values and no block tables, unless asked for: a replay
    draws random ones.

    Args:
        file: where to write; a file that is there is replaced.
        query, cache, batch, spec: of the call, JAX's arrays or torch's tensors.
        values: also write the values of all arrays and the block tables; the file then holds the
            whole cache, compressed.
        backend, return_lse, batch_invariant: of the call.
        arrays: its keywords for arrays, `sinks`, `bias` and `selection`.

    Raises:
        InvalidInputError: the arguments do not fit together; or JAX traces what must be written
            down: the lengths, and with `values` everything.

    Example:
        >>> import json, pathlib, tempfile
        >>> from pagedattn import AttentionSpec
        >>> from pagedattn.testing import batch_of, cache_of, random_problem
        >>> problem = random_problem([1, 3], [9, 3], AttentionSpec())
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "call.json"
        >>> record(file, problem.query, cache_of(problem), batch_of(problem))
        >>> json.loads(file.read_text()).get("batch").get("seq_lens")
        [9, 3]
    """
    # Tensors stay tensors: their strides, and the backends that take them, are part of the call.
    described = _described if is_torch(query) else takes_any_array(_described)
    options = {"return_lse": return_lse, "batch_invariant": batch_invariant}
    kept = described(query, cache, batch, spec, values=values, **options, **arrays)
    kept["options"] = {"backend": None if backend is None else str(backend), **options}
    Path(file).write_text(json.dumps(kept, indent=1) + "\n")


def _described(
    query, cache, batch, spec, *, values, return_lse, batch_invariant, **arrays
) -> dict[str, Any]:
    given = given_of(arrays)
    validate.attention(query, cache, batch, spec, return_lse, batch_invariant)
    validate_arrays(given, query)
    validate_fit(given, cache, batch)
    call = call_of(query, cache, batch, spec, return_lse, batch_invariant, **given)
    framework = Framework.TORCH if is_torch(query) else Framework.JAX
    held = {f.name: getattr(cache, f.name) for f in dataclasses.fields(cache)}
    planes = {name: held.pop(name) for name in tuple(held) if hasattr(held[name], "shape")}
    arrays = {"query": query, **planes, **{n: _array_of(option) for n, option in given.items()}}
    return {
        "format": FORMAT,
        "framework": framework.name.lower(),
        "spec": dataclasses.asdict(spec),
        "batch": _lengths(batch, values),
        "cache": {name: fact for name, fact in held.items() if fact is not None},
        "arrays": {name: _facts(name, array, values) for name, array in arrays.items()},
        "explain": _explained(select.explain(call, framework)),
        "versions": machine.versions(),
        "machine": {"devices": machine.devices(), "processor": machine.processor()},
    }


def _array_of(option):
    """The array of an option, which may be a record that holds it."""
    (array,) = jax.tree.leaves(option)
    return array


def _lengths(batch: BatchMetadata, values: bool) -> dict[str, Any]:
    starts = np.maximum.accumulate(_read("query_start_loc", batch.query_start_loc))
    lengths = {
        "query_lens": np.diff(starts).tolist(),
        "seq_lens": _read("seq_lens", batch.seq_lens).tolist(),
        "block_size": batch.block_size,
        "max_blocks": batch.max_blocks,
        "max_query_len": batch.max_query_len,
    }
    if batch.tree is not None:
        lengths["parents"] = _read("parents", batch.tree.parents).tolist()
    if values:
        lengths["block_tables"] = _read("block_tables", batch.block_tables).tolist()
    return lengths


def _facts(name: str, array, values: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {"shape": [*array.shape], "dtype": dtype_name(array.dtype)}
    strides = strides_of(array)
    if not is_dense(array.shape, strides):
        facts["strides"] = [*strides]
    if values:
        packed = zlib.compress(_read(name, array).tobytes(), 1)
        facts["values"] = base64.b64encode(packed).decode()
    return facts


def _read(name: str, array) -> np.ndarray:
    """The values of an array, of whatever device: a report may wait for them."""
    if isinstance(array, Tracer):
        raise InvalidInputError(
            f"record must know {name}, which JAX traces: call it outside jit, with the arrays that "
            "the jitted function is called with"
        )
    if is_torch(array):
        require_memory(name, array)
        array = array.detach().cpu().contiguous()
        # NumPy has no bfloat16, and JAX by default nothing of 64 bits.
        wide = dtype_name(array.dtype).endswith("64")
        array = (np if wide else jax.dlpack).from_dlpack(array)
    return np.asarray(array)


def _explained(explanation: select.Explanation) -> dict[str, Any]:
    refused = {name: reasons for name, reasons in explanation.items() if reasons}
    passed_over = explanation.passed_over
    return {"choice": explanation.choice, "passed_over": passed_over, "refused": refused}

"""What is done around a backend that does not do it itself, for arrays of any framework."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxtyping import Bool

from .._arrays.namespace import arange, as_dtype, wide_dtype
from ..batch.metadata import Sequences
from .backend import Backend
from .call import Call
from .options import AROUND, OF_CACHES


def attend(
    backend: Backend, call: Call, query, cache, plan, live: Any, options: Mapping[str, Any]
) -> tuple[Any, Any]:
    """out and lse of a call by a backend, which is asked for what it supports.

    Args:
      plan: what the backend planned for `backend.native_call(call)`.
      live: `live_tokens` of the call.
      options: the arrays that the call brings beside query and cache, by their keywords.
    """
    native, dtype = backend.native_call(call), query.dtype
    query = query if native.dtype == call.dtype else as_dtype(query, wide_dtype(query))
    around, supported, planes = [], {}, cache
    for name, of_cache in OF_CACHES.items():
        natively = name in backend.supports or (of_cache.unless and getattr(call, of_cache.unless))
        for field in () if natively else of_cache.fields:
            if getattr(cache, field) is not None:
                around.append((of_cache.around, cache))
                planes = replace(planes, **dict.fromkeys(of_cache.fields))
                break
    for name, array in options.items():
        if array is None:
            continue
        if name in AROUND and name not in backend.supports:
            around.append((AROUND[name], array))
        else:
            supported[name] = array
    for layer, given in reversed(around):
        query = layer.before(query, given, live)
    out, lse = backend.run(native, query, planes, plan, **supported)
    for layer, given in around:
        out, lse = layer.after(out, lse, given, live)
    return out if native.dtype == call.dtype else as_dtype(out, dtype), lse


def live_tokens(call: Call, batch: Sequences) -> Bool[Any, "num_tokens"] | None:
    """Which tokens are no padding; None where nothing around a backend asks for it."""
    starts = batch.query_start_loc
    for around in AROUND.values():
        if around.fact and getattr(call, around.fact) and around.needs_live(starts):
            return arange(call.num_tokens, starts) < starts.max()
    return None

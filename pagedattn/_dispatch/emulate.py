"""What is done around a backend that does not do it itself, for arrays of any framework."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxtyping import Bool, Float

from .._arrays.namespace import arange, as_dtype, namespace, wide_dtype
from .._arrays.typing import is_torch
from ..batch.metadata import Sequences
from ..cache.kv_cache import KVCache
from ..cache.quantise import scaled
from .backend import SCALES, Backend
from .call import Call


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
    supported = {name: array for name, array in options.items() if getattr(native, name)}
    run = backend.run if SCALES in backend.supports else partial(_with_scales, backend.run, live)
    out, lse = run(native, query, cache, plan, **supported)
    if native.sinks != call.sinks:
        out, lse = with_sinks(out, lse, options["sinks"], live)
    return out if native.dtype == call.dtype else as_dtype(out, dtype), lse


def _with_scales(run: Callable, live, call: Call, query, cache: KVCache, plan, **options):
    """A key's scale is a factor on its logits, a value's one on what is summed.

    The gradient of a scale sums over all rows, so NaN in those of padding tokens is taken out.
    """
    key_scale, value_scale = cache.key_scale, scale_of_values(cache)
    if key_scale is not None:
        query = scaled(_without_padding(query, live), key_scale, call.num_kv_heads)
    planes = KVCache(cache.key, cache.value, value_dim=cache.value_dim)
    out, lse = run(call, query, planes, plan, **options)
    if value_scale is not None:
        out = _without_padding(scaled(out, value_scale, call.num_kv_heads), live)
    return out, lse


def _without_padding(rows, live):
    """The rows, 0 for padding tokens."""
    return rows if live is None else namespace(rows).where(live[:, None, None], rows, 0)


def scale_of_values(cache: KVCache) -> Any:
    """Those of a latent cache are columns of its keys."""
    return cache.key_scale if cache.value is None else cache.value_scale


def live_tokens(call: Call, batch: Sequences) -> Bool[Any, "num_tokens"] | None:
    """Which tokens are no padding; None where nothing around a backend asks for it.

    Sinks do, and gradients of scales, which torch's tensors do not have.
    """
    starts = batch.query_start_loc
    if not call.sinks and (call.cache_dtype is None or is_torch(starts)):
        return None
    return arange(call.num_tokens, starts) < starts.max()


def with_sinks(
    out: Float[Any, "num_tokens num_heads head_dim"],
    lse: Float[Any, "num_tokens num_heads"],
    sinks: Float[Any, "num_heads"],
    live: Bool[Any, "num_tokens"],
) -> tuple[Float[Any, "num_tokens num_heads head_dim"], Float[Any, "num_tokens num_heads"]]:
    """The results with a sink in each head's softmax: `merge_states(out, lse, 0, sinks)`."""
    xp = namespace(out)
    seen = lse > -xp.inf
    known = xp.where(seen, lse, 0.0)  # -inf - -inf is NaN, in a gradient too
    sinks = as_dtype(sinks, lse.dtype)[None]
    total = xp.logaddexp(known, sinks)
    weight = xp.where(live[:, None], xp.exp(known - total), 0)[..., None]
    wide = as_dtype(out, wide_dtype(out))
    out = as_dtype(wide * as_dtype(weight, wide.dtype), out.dtype)
    return out, xp.where(live[:, None], xp.where(seen, total, sinks), -xp.inf)

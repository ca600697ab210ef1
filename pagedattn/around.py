"""What is done around a backend that does not do it itself, for arrays of any framework."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxtyping import Bool, Float

from .backend import SCALES, Backend
from .batch import Sequences
from .cache import KVCache
from .call import Call
from .quantise import scaled
from .ragged import arange, namespace, wide_dtype


def attend(
    backend: Backend, call: Call, query, cache, plan, live: Any, options: Mapping[str, Any]
) -> tuple[Any, Any]:
    """out and lse of a call by a backend, which is asked for what it honours.

    Args:
      plan: what the backend planned for `backend.own(call)`.
      live: `live_tokens` of the call.
      options: the arrays that the call brings beside query and cache, by their keywords.
    """
    own = backend.own(call)
    honoured = {name: array for name, array in options.items() if getattr(own, name)}
    run = backend.run if SCALES in backend.honours else partial(_with_scales, backend.run)
    out, lse = run(own, query, cache, plan, **honoured)
    return (out, lse) if own.sinks == call.sinks else with_sinks(out, lse, options["sinks"], live)


def _with_scales(run: Callable, call: Call, query, cache: KVCache, plan, **options):
    """A key's scale is a factor on its logits, a value's one on what is summed."""
    query = scaled(query, cache.key_scale, call.num_kv_heads)
    planes = KVCache(cache.key, cache.value, value_dim=cache.value_dim)
    out, lse = run(call, query, planes, plan, **options)
    return scaled(out, scale_of_values(cache), call.num_kv_heads), lse


def scale_of_values(cache: KVCache) -> Any:
    """Those of a latent cache are columns of its keys."""
    return cache.key_scale if cache.value is None else cache.value_scale


def live_tokens(call: Call, batch: Sequences) -> Bool[Any, "num_tokens"] | None:
    """Which tokens are no padding; None where nothing around a backend asks for it."""
    if not call.sinks:
        return None
    starts = batch.query_start_loc
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
    sinks = xp.asarray(sinks, dtype=lse.dtype)[None]
    total = xp.logaddexp(known, sinks)
    weight = xp.exp(known - total)[..., None]
    wide = xp.asarray(out, dtype=wide_dtype(out))
    out = xp.asarray(wide * xp.asarray(weight, dtype=wide.dtype), dtype=out.dtype)
    return out, xp.where(live[:, None], xp.where(seen, total, sinks), -xp.inf)

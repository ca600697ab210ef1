"""Paged attention by cuDNN's fused kernels, for long queries on NVIDIA GPUs: native in XLA.

The pages are gathered (2 % of a long prefill's time) and given to cuDNN packed, or as
rectangles: one row of queries and one row of keys for each sequence.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..._dispatch.backend import Backend
from ..._dispatch.call import Call
from ...batch.metadata import Sequences
from ...cache.kv_cache import KVCache
from ..gradient import with_xla_gradient
from . import packed, rectangles
from .kernel import missing

DTYPES = ("bfloat16", "float16")
MOST_PADDING = 2  # rows of the rectangle for each token of the batch: more cost more than they gain
SUPPORTS = frozenset({"scale", "causal", "sliding_window", "return_lse"})


def refusals(call: Call) -> list[str]:
    """Why cuDNN cannot run a call.

    Soft-cap and ALiBi are not in `SUPPORTS`: XLA has no way to cuDNN's soft-cap, and to its ALiBi
    only one for a single family of slopes.
    """
    reasons = _missing()
    if call.dtype not in DTYPES:
        reasons.append(f"cuDNN takes {' and '.join(DTYPES)}, not {call.dtype}")
    if call.head_dim % 8 or call.head_dim > 256:
        reasons.append(f"head_dim must be a multiple of 8 up to 256, got {call.head_dim}")
    if call.spec.sliding_window is not None and not call.spec.causal:
        reasons.append("sliding_window with causal=False: cuDNN bounds a window to the left only")
    return reasons


def slower_because(call: Call) -> list[str]:
    """Why another backend is likely faster, judged by shapes: the rule of `backend=None`.

    Where Mosaic does not run, cuDNN's kernels are the fastest that JAX brings along; but the keys
    must first be gathered, and may have to be padded to rectangles. So queries must be long enough
    to reuse a gathered key, and of like lengths: a few prefills among many decodes would pad every
    decode to the longest prefill.
    """
    reasons, by = [], call.crossings
    if call.longest_query < (least := by.cudnn_query_len):
        reasons.append(f"short queries: max_query_len is {call.longest_query}, below {least}")
    if call.num_tokens * call.capacity < by.cudnn_work:
        reasons.append(f"little work: {call.num_tokens} tokens")
    rows = call.num_seqs * (call.longest_query + rectangles.reach(call))
    if rows > MOST_PADDING * call.num_tokens:
        reasons.append(
            f"mixed batch or wide window: {rows} padded rows for {call.num_tokens} tokens"
        )
    return reasons


@functools.partial(jax.jit, static_argnames="call")
def run(
    call: Call,
    query: Float[Array, "num_tokens num_heads head_dim"],
    cache: KVCache,
    batch: Sequences,
) -> tuple[
    Float[Array, "num_tokens num_heads head_dim"], Float[Array, "num_tokens num_heads"] | None
]:
    if not call.spec.causal:
        return rectangles.bidirectional(call, query, cache, batch)
    layout = packed if call.window is None and _packs(call) else rectangles
    # One switch, not nested ones: a branch that only passes its arguments on copies them.
    ways, way = [layout.alone], jnp.int32(0)
    if call.window is None:
        ways.append(layout.joined)
        way = jnp.any(packed.context_lens(batch) > 0).astype(jnp.int32)
    if rectangles.may_be_full(call):
        full = jnp.all(batch.query_lens == call.longest_query) & jnp.all(batch.context_lens == 0)
        way = jnp.where(full, len(ways), way)
        ways.append(rectangles.full)
    ways = [functools.partial(way, call) for way in ways]
    return jax.lax.switch(way, ways, query, cache, batch)


BACKEND = Backend("cudnn", SUPPORTS, with_xla_gradient(run), refusals, slower_because)


def _missing() -> list[str]:
    if _capability() < (8, 0):
        return [f"cuDNN's kernels need compute capability 8.0, this GPU has {_capability()}"]
    return missing()


@functools.cache
def _capability() -> tuple[int, ...]:
    """The lowest compute capability of the GPUs."""
    versions = (str(device.compute_capability).split(".") for device in jax.devices("gpu"))
    return min(tuple(map(int, version)) for version in versions)


def _packs(call) -> bool:
    return packed.packs(call) and _capability() >= (9, 0)

"""Attention of new tokens where the keys of their context are spread over devices.

The new tokens of a step see two sets of keys. Those of the context, which are spread, are earlier
than all of them: so each device attends to its own without a mask, in whatever order they lie.
Those of the step itself are at hand on every device; one device for each sequence attends to them,
with the mask. `merge_states` adds both, and `merge_across` joins the devices. A decode, a chunk of
a prompt and any mix are this one step. All functions are called inside `jax.shard_map`.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from context.blocks import AXIS, turn
from context.windows import bias_here, in_window
from pagedattn import (
    AttentionSpec,
    BatchMetadata,
    KVCache,
    merge_across,
    merge_states,
    paged_attention,
    write_kv,
)

Heads = Float[Array, "num_tokens num_heads head_dim"]
Results = tuple[Heads, Float[Array, "num_tokens num_heads"]]  # out and lse
Sinks = Float[Array, " num_heads"]


def attend(
    query: Heads,
    key: Heads,
    value: Heads,
    cache: KVCache,
    batch: BatchMetadata,
    spec: AttentionSpec = AttentionSpec(),
    sinks: Sinks | None = None,
) -> tuple[Heads, KVCache]:
    """Attention of new tokens, and this device's cache with its share of their keys and values."""
    cache = write_kv(cache, key, value, batch.slot_mapping)
    context = attend_to_context(query, cache, batch, spec)
    new = attend_to_new(query, key, value, cache, batch, spec, sinks)
    return merge_across(*merge_states(*context, *new), AXIS)[0], cache


def attend_to_context(
    query: Heads, cache: KVCache, batch: BatchMetadata, spec: AttentionSpec
) -> Results:
    """Attention to the keys of the context that lie here."""
    shown, bias = batch, None
    tokens = jnp.arange(batch.max_blocks * batch.block_size, dtype=jnp.int32)[None]
    if spec.sliding_window is not None:
        tokens, shown = in_window(batch, spec.sliding_window)
        planes = (plane.reshape(-1, 1, *plane.shape[2:]) for plane in cache.planes)
        cache = cache.with_planes(*planes)
    if spec.alibi_slopes is not None:
        bias = bias_here(tokens, batch, spec)
    unmasked = replace(spec, causal=False, sliding_window=None, alibi_slopes=None)
    return paged_attention(query, cache, shown, unmasked, bias=bias, return_lse=True)


def attend_to_new(
    query: Heads,
    key: Heads,
    value: Heads,
    cache: KVCache,
    batch: BatchMetadata,
    spec: AttentionSpec,
    sinks: Sinks | None,
) -> Results:
    """Attention of the step's tokens to each other, of each sequence on one device.

    The keys pass through a small cache in blocks of one token, which rounds them as the large one.
    """
    starts, longest, device = batch.query_start_loc, batch.max_query_len, jax.lax.axis_index(AXIS)
    has_room = batch.positions.at[starts[:-1]].get(mode="clip") >= 0
    here = has_room & (turn(jnp.arange(batch.num_seqs)) == 0)
    new = replace(
        batch,
        block_tables=starts[:-1, None] + jnp.arange(longest, dtype=jnp.int32),
        seq_lens=jnp.where(here, jnp.diff(starts), 0),
        block_size=1,
    )
    empty = (jnp.zeros((len(key), 1, *plane.shape[2:]), plane.dtype) for plane in cache.planes)
    small = write_kv(cache.with_planes(*empty), key, value, jnp.arange(len(key)))
    if sinks is not None:
        sinks = jnp.where(device == 0, sinks, -jnp.inf)  # they take weight once
    return paged_attention(query, small, new, spec, sinks=sinks, return_lse=True)

"""Context parallel: the blocks of each sequence spread over devices, none of which could hold it.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/context_parallel.py

Where the blocks lie, and how they grow, is in context_blocks.py. The new tokens of a step see two
sets of keys. Those of the context, which are spread, are earlier than all of them: so each device
attends to its own without a mask, in whatever order they lie. Those of the step itself are at hand
on every device; one device for each sequence attends to them, with the mask. `merge_states` adds
both, and `merge_across` joins the devices. A decode, a chunk of a prompt and any mix are this one
step.

A sliding window shows each new token the last ones of the keys that a device has, from anywhere in
a block on: so each is a sequence of its own there, in blocks of one token, and needs no mask
either. ALiBi depends on how far back a key lies: a device knows where its own stand, and says so by
a bias.

All functions are called inside `jax.shard_map`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from context_blocks import AXIS, grow, length_here, positions_of, turn
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from pagedattn import (
    AttentionSpec,
    BatchMetadata,
    BlockPool,
    KVCache,
    alibi_bias,
    init_block_pool,
    init_kv_cache,
    merge_across,
    merge_states,
    paged_attention,
    ragged_attention,
    write_kv,
)
from pagedattn.extend import cdiv, sequence_ids

SPREAD, EVERYWHERE = PartitionSpec(AXIS), PartitionSpec()
Heads = Float[Array, "num_tokens num_heads head_dim"]
Results = tuple[Heads, Float[Array, "num_tokens num_heads"]]  # out and lse
Sinks = Float[Array, " num_heads"]
State = tuple[BlockPool, KVCache]


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


def in_window(
    batch: BatchMetadata, window: int
) -> tuple[Int[Array, "num_tokens num_keys"], BatchMetadata]:
    """What a window shows each new token of the keys that lie here, as a sequence of its own.

    Returns:
      the keys, counted among those of the sequence that lie here; the batch, in blocks of one
      token: a window may begin anywhere in a block.
    """
    size, seqs = batch.block_size, sequence_ids(batch.query_start_loc, batch.num_tokens)
    oldest = jnp.maximum(batch.positions - window + 1, 0)
    first = length_here(oldest, seqs, size)
    most = cdiv(cdiv(window - 2, size) + 1, jax.lax.axis_size(AXIS))
    tokens = first[:, None] + jnp.arange(min(most, batch.max_blocks) * size, dtype=jnp.int32)
    blocks = jnp.take_along_axis(batch.block_tables[seqs], tokens // size, axis=1, mode="clip")
    shown = replace(
        batch,
        block_tables=blocks * size + tokens % size,
        seq_lens=jnp.where(seqs < 0, 0, jnp.clip(batch.seq_lens[seqs] - first, 0)),
        query_start_loc=jnp.arange(batch.num_tokens + 1, dtype=jnp.int32),
        block_size=1,
        max_query_len=1,
    )
    return tokens, shown


def bias_here(
    tokens: Int[Array, "*n num_keys"], batch: BatchMetadata, spec: AttentionSpec
) -> Float[Array, "num_tokens heads num_keys"]:
    """ALiBi of keys that lie here, `tokens` of each new token's sequence or of all."""
    seqs = sequence_ids(batch.query_start_loc, batch.num_tokens)
    keys = positions_of(tokens, seqs, batch.block_size)
    return alibi_bias(batch.positions[:, None], keys, spec.alibi_slopes)[:, :, 0]


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

    The keys pass through a small cache, which rounds them as the large one does.
    """
    starts, longest, device = batch.query_start_loc, batch.max_query_len, jax.lax.axis_index(AXIS)
    has_room = batch.positions.at[starts[:-1]].get(mode="clip") >= 0
    here = has_room & (turn(jnp.arange(batch.num_seqs)) == 0)
    new = replace(
        batch,
        block_tables=starts[:-1, None] + jnp.arange(longest),  # each token is a block
        seq_lens=jnp.where(here, batch.query_lens, 0),
        block_size=1,
    )
    empty = (jnp.zeros((len(key), 1, *plane.shape[2:]), plane.dtype) for plane in cache.planes)
    small = write_kv(cache.with_planes(*empty), key, value, jnp.arange(len(key)))
    if sinks is not None:
        sinks = jnp.where(device == 0, sinks, -jnp.inf)  # they take weight once
    return paged_attention(query, small, new, spec, sinks=sinks, return_lse=True)


def start(mesh: Mesh, make: Callable[[], State]) -> State:
    """What `make` returns, on every device of the mesh: leaves stacked, and spread over them."""

    def stacked():
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (mesh.size, *leaf.shape)), make())

    return jax.jit(stacked, out_shardings=NamedSharding(mesh, SPREAD))()


@partial(jax.jit, static_argnames=("mesh", "max_query_len", "spec"), donate_argnames="state")
def step(
    mesh: Mesh,
    state: State,
    heads: tuple[Heads, Heads, Heads],
    new: Int[Array, " max_seqs"],
    max_query_len: int,
    spec: AttentionSpec = AttentionSpec(),
    sinks: Sinks | None = None,
) -> tuple[State, Heads, Bool[Array, " max_seqs"]]:
    """One layer's step on all devices: what has come of the state, out, and who has grown."""

    def on_each(state, heads, new, sinks):
        pool, cache = jax.tree.map(lambda leaf: leaf[0], state)
        query, key, value = heads
        pool, batch, ok = grow(pool, new, num_tokens=len(query), max_query_len=max_query_len)
        out, cache = attend(query, key, value, cache, batch, spec, sinks)
        return jax.tree.map(lambda leaf: leaf[None], (pool, cache)), out, ok

    outs = (SPREAD, EVERYWHERE, EVERYWHERE)
    on_all = jax.shard_map(on_each, mesh=mesh, in_specs=(*outs, EVERYWHERE), out_specs=outs)
    return on_all(state, heads, new, sinks)


def main() -> None:
    """A sequence of 1000 tokens in chunks of 96, on devices that each hold a part of it."""
    mesh = Mesh(np.array(jax.devices()), AXIS)
    num_blocks = cdiv(cdiv(1000, 16), mesh.size)

    def make():
        pool = init_block_pool(num_blocks, 16, max_seqs=1, max_blocks=num_blocks)
        return pool, init_kv_cache(num_blocks, 16, num_kv_heads=2, head_dim=64, dtype=jnp.float32)

    state = start(mesh, make)
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.standard_normal((1000, heads, 64)), jnp.float32) for heads in (8, 2, 2)
    )
    outs = []
    for begin in range(0, 1000, 96):
        heads = tuple(x[begin : begin + 96] for x in (query, key, value))
        new = jnp.array([len(heads[0])])
        state, out, ok = step(mesh, state, heads, new, max_query_len=96)
        assert ok.all()
        outs.append(np.asarray(out))
    starts = jnp.array([0, 1000])
    want = ragged_attention(
        *(query, key, value, starts, starts), max_query_len=1000, max_key_len=1000
    )
    error = np.abs(np.concatenate(outs) - np.asarray(want)).max()
    print(f"{mesh.size} devices with {num_blocks} blocks each; largest difference: {error:.1e}")
    assert error < 1e-5


if __name__ == "__main__":
    main()

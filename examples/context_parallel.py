"""Context parallel: the blocks of each sequence spread over devices, none of which could hold it.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/context_parallel.py

Block i of sequence s lies on device (i + s) % num_devices, in that device's own pool and cache. The
new tokens of a step see two sets of keys. Those of the context, which are spread, are earlier than
all of them: so each device attends to its own without a mask, in whatever order they lie, and
`merge_across` joins the devices. Those of the step itself are at hand on every device and need no
cache: `ragged_attention` masks them, and `merge_states` adds them. A decode, a chunk of a prompt
and any mix are this one step.

Not for sliding windows and ALiBi, which depend on how far back a key lies: a layer with a window
needs no spreading, since one device can hold all that it sees.

All functions are called inside `jax.shard_map`. A chunk's own keys are attended to on every device,
so let a chunk be short beside the context.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from pagedattn import (
    AttentionSpec,
    BatchMetadata,
    BlockPool,
    KVCache,
    UnsupportedError,
    append_tokens,
    init_block_pool,
    init_kv_cache,
    merge_across,
    merge_states,
    paged_attention,
    positions,
    ragged_attention,
    slot_mapping,
    write_kv,
)
from pagedattn.ragged import cdiv, sequence_ids

AXIS = "context"
SPREAD, EVERYWHERE = PartitionSpec(AXIS), PartitionSpec()
Heads = Float[Array, "num_tokens num_heads head_dim"]
State = tuple[BlockPool, KVCache]


def length_here(
    lengths: Int[Array, " n"], seqs: Int[Array, " n"], block_size: int
) -> Int[Array, " n"]:
    """How many of the first `lengths` tokens of some sequences lie on this device."""
    num_devices = jax.lax.axis_size(AXIS)
    turn = (jax.lax.axis_index(AXIS) - seqs) % num_devices  # of blocks turn, turn + num_devices...
    whole = lengths // block_size
    rest = jnp.where(whole % num_devices == turn, lengths % block_size, 0)
    return cdiv(whole - turn, num_devices) * block_size + rest


def grow(
    pool: BlockPool, new: Int[Array, " max_seqs"], *, num_tokens: int, max_query_len: int
) -> tuple[BlockPool, BatchMetadata, Bool[Array, " max_seqs"]]:
    """Takes blocks for new tokens, each device for its own; once a step, for all layers.

    Returns:
      the pool; the batch: queries are all new tokens, keys those of the context that lie here, and
      slots are -1 for tokens that lie elsewhere; which sequences have grown: on every device, or
      on none.
    """
    rows, size = jnp.arange(pool.max_seqs, dtype=jnp.int32), pool.block_size
    context = jax.lax.psum(pool.seq_lens, AXIS)
    here = length_here(context + new, rows, size) - pool.seq_lens
    _, growth = append_tokens(pool, here, max_new_tokens=max_query_len)
    ok = jax.lax.pmin(growth.ok.astype(jnp.int32), AXIS) > 0
    grown, _ = append_tokens(pool, jnp.where(ok, here, 0), max_new_tokens=max_query_len)
    starts = jnp.append(jnp.int32(0), jnp.cumsum(jnp.where(ok, new, 0), dtype=jnp.int32))
    seqs = sequence_ids(starts, num_tokens)
    at = positions(starts, context + jnp.diff(starts), num_tokens)
    before = length_here(at, seqs, size)
    slot_at = jnp.where(length_here(at + 1, seqs, size) > before, before, -1)
    batch = BatchMetadata(
        block_tables=grown.block_tables,
        seq_lens=pool.seq_lens,
        query_start_loc=starts,
        slot_mapping=slot_mapping(grown.block_tables, seqs, slot_at, block_size=size),
        positions=at,
        block_size=size,
        max_query_len=max_query_len,
    )
    return grown, batch, ok


def attend(
    query: Heads,
    key: Heads,
    value: Heads,
    cache: KVCache,
    batch: BatchMetadata,
    spec: AttentionSpec = AttentionSpec(),
) -> tuple[Heads, KVCache]:
    """Attention of new tokens to their sequences, and this device's cache with its share of them.

    Raises:
      UnsupportedError: a spec or a cache that it would not compute exactly.
    """
    require_exact(cache, spec)
    cache = write_kv(cache, key, value, batch.slot_mapping)
    unmasked = replace(spec, causal=False)
    context = paged_attention(query, cache, batch, unmasked, return_lse=True)
    starts, longest = batch.query_start_loc, batch.max_query_len
    new = ragged_attention(
        *(query, key, value, starts, starts, spec),
        max_query_len=longest,
        max_key_len=longest,
        return_lse=True,
    )
    return merge_states(*merge_across(*context, AXIS), *new)[0], cache


def require_exact(cache: KVCache, spec: AttentionSpec) -> None:
    refused = {
        "sliding_window": spec.sliding_window is not None,
        "alibi_slopes": spec.alibi_slopes is not None,
        "caches in eight bits (a step's own keys are not rounded)": cache.key.dtype.itemsize == 1,
    }
    if named := ", ".join(name for name, asked in refused.items() if asked):
        raise UnsupportedError(f"not with keys spread over devices: {named}")


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
) -> tuple[State, Heads, Bool[Array, " max_seqs"]]:
    """One layer's step on all devices: what has come of the state, out, and who has grown."""

    def on_each(state, heads, new):
        pool, cache = jax.tree.map(lambda leaf: leaf[0], state)
        query, key, value = heads
        pool, batch, ok = grow(pool, new, num_tokens=len(query), max_query_len=max_query_len)
        out, cache = attend(query, key, value, cache, batch, spec)
        return jax.tree.map(lambda leaf: leaf[None], (pool, cache)), out, ok

    specs = (SPREAD, EVERYWHERE, EVERYWHERE)
    return jax.shard_map(on_each, mesh=mesh, in_specs=specs, out_specs=specs)(state, heads, new)


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

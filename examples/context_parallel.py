"""Context parallel: the blocks of each sequence spread over devices, none of which could hold it.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/context_parallel.py

context/blocks.py says where blocks lie, context/attention.py how new tokens attend to all of them.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from context.attention import Heads, Sinks, attend
from context.blocks import AXIS, grow
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int

import pagedattn as pa
from pagedattn.extend import cdiv

SPREAD, EVERYWHERE = PartitionSpec(AXIS), PartitionSpec()
State = tuple[pa.BlockPool, pa.KVCache]


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
    spec: pa.AttentionSpec = pa.AttentionSpec(),
    sinks: Sinks | None = None,
) -> tuple[State, Heads, Bool[Array, " max_seqs"]]:
    """One layer's step on all devices: what has come of the state, out, and who has grown."""

    def on_each(state, heads, new, sinks):
        (pool, cache), (query, key, value) = jax.tree.map(lambda leaf: leaf[0], state), heads
        pool, batch, ok = grow(pool, new, num_tokens=len(query), max_query_len=max_query_len)
        out, cache = attend(query, key, value, cache, batch, spec, sinks)
        return jax.tree.map(lambda leaf: leaf[None], (pool, cache)), out, ok

    outs = (SPREAD, EVERYWHERE, EVERYWHERE)
    on_all = jax.shard_map(on_each, mesh=mesh, in_specs=(*outs, EVERYWHERE), out_specs=outs)
    return on_all(state, heads, new, sinks)


def main(length: int = 1000, chunk: int = 96) -> None:
    """A prompt in chunks, on devices that each hold a part of its keys and values."""
    mesh = Mesh(np.array(jax.devices()), AXIS)
    num_blocks = cdiv(cdiv(length, 16), mesh.size)

    def make():
        pool = pa.init_block_pool(num_blocks, 16, max_seqs=1, max_blocks=num_blocks)
        return pool, pa.init_kv_cache(num_blocks, 16, 2, 64, jnp.float32)

    query, key, value = jax.random.normal(jax.random.key(0), (3, length, 2, 64))
    state, outs = start(mesh, make), []
    for begin in range(0, length, chunk):
        heads = tuple(x[begin : begin + chunk] for x in (query, key, value))
        state, out, _ = step(mesh, state, heads, jnp.array([len(heads[0])]), max_query_len=chunk)
        outs.append(np.asarray(out))
    own, ends = (query, key, value), jnp.array([0, length])
    want = pa.ragged_attention(*own, ends, ends, max_query_len=length, max_key_len=length)
    print(f"{mesh.size} devices; largest difference: {abs(np.concatenate(outs) - want).max():.1e}")


if __name__ == "__main__":
    main()

"""A pool's functions inside jax.shard_map: a pool that all devices have, and what each has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import pagedattn as pa

ROWS = 2
POOL = pa.init_block_pool(8, 4, max_seqs=ROWS, max_blocks=4)


def grown(pool, tokens=(5, 3)):
    return pa.append_tokens(pool, jnp.array(tokens))[0]


def step(pool, new):
    return pa.next_batch(pool, new, num_tokens=4, max_query_len=2)


def accepted(pool, new):
    pool, batch, _ = step(pool, new)
    cache = pa.init_kv_cache(8, 4, 1, 8)
    return pa.accept_tokens(pool, cache, new[:, None] - 1, batch)


def swapped_in(pool, new):
    pool, other, _ = pa.swap_out(pool, POOL, new - 1, new - 1)
    return pa.swap_in(pool, other, new - 1, new - 1)


# Of a pool in which both rows have tokens, and of [1, 1] on each device.
CALLS = {
    "append_tokens": pa.append_tokens,
    "next_batch": step,
    "batch_from_pool": lambda pool, new: pa.batch_from_pool(
        pool, new, num_tokens=2, max_query_len=1
    ),
    "accept_tokens": accepted,
    "release": lambda pool, new: pa.release(pool, new[:1]),
    "release_behind": lambda pool, new: pa.release_behind(grown(pool, new), 2, max_new_tokens=5),
    "hold_blocks": pa.hold_blocks,
    "drop_blocks": lambda pool, new: pa.drop_blocks(pa.hold_blocks(pool, jnp.array([1])), new),
    "fork": lambda pool, new: pa.fork(pa.release(pool, new[:1])[0], new[:1] - 1, new[:1]),
    "share_blocks": lambda pool, new: pa.share_blocks(
        pa.release(pool, jnp.array([1]))[0], new[0], pool.block_tables[0, :1], 4
    ),
    "swap_out": lambda pool, new: pa.swap_out(pool, POOL, new[:1], new[:1]),
    "swap_in": swapped_in,
}


@pytest.mark.parametrize("made", ["inside", "outside"])
@pytest.mark.parametrize("name", CALLS)
def test_a_pool_of_all_devices_takes_what_each_has(name, made):
    """JAX's types say which arrays differ from device to device, on a mesh of one device, too."""
    mesh, everywhere = Mesh(np.array(jax.devices()[:1]), "device"), PartitionSpec()
    each = PartitionSpec("device")

    def call(pool, new):
        if made == "inside":
            pool = grown(pa.init_block_pool(8, 4, max_seqs=ROWS, max_blocks=4))
        return jax.tree.map(lambda leaf: leaf[None], CALLS[name](pool, new[0]))

    pool, new = grown(POOL), jnp.ones((1, ROWS), jnp.int32)
    over_devices = jax.shard_map(call, mesh=mesh, in_specs=(everywhere, each), out_specs=each)
    results = jax.tree.map(lambda leaf: leaf[0], jax.jit(over_devices)(pool, new))
    want = CALLS[name](pool, new[0])
    assert jax.tree.all(jax.tree.map(jnp.array_equal, results, want))

"""Where the blocks of sequences lie that are spread over devices.

Block i of sequence s lies on device (i + s) % num_devices, in that device's own pool and cache. All
functions are called inside `jax.shard_map`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pagedattn import BatchMetadata, BlockPool, append_tokens, positions, slot_mapping
from pagedattn.extend import cdiv, sequence_ids

AXIS = "context"


def turn(seqs: Int[Array, "*n"]) -> Int[Array, "*n"]:
    """Of blocks turn, turn + num_devices, ... of some sequences this device has the keys."""
    return (jax.lax.axis_index(AXIS) - seqs) % jax.lax.axis_size(AXIS)


def length_here(
    lengths: Int[Array, " n"], seqs: Int[Array, " n"], block_size: int
) -> Int[Array, " n"]:
    """How many of the first `lengths` tokens of some sequences lie on this device."""
    num_devices, first = jax.lax.axis_size(AXIS), turn(seqs)
    whole = lengths // block_size
    rest = jnp.where(whole % num_devices == first, lengths % block_size, 0)
    return cdiv(whole - first, num_devices) * block_size + rest


def positions_of(
    tokens: Int[Array, "n m"], seqs: Int[Array, " n"], block_size: int
) -> Int[Array, "n m"]:
    """Where tokens of some sequences stand, of which this device counts only its own."""
    blocks = tokens // block_size * jax.lax.axis_size(AXIS) + turn(seqs)[:, None]
    return blocks * block_size + tokens % block_size


def grow(
    pool: BlockPool, new: Int[Array, " max_seqs"], *, num_tokens: int, max_query_len: int
) -> tuple[BlockPool, BatchMetadata, Bool[Array, " max_seqs"]]:
    """Takes blocks for new tokens, each device for its own; once a step, for all layers.

    Returns:
      the pool; the batch: queries are all new tokens, keys those of the context that lie here, and
      slots are -1 for tokens that lie elsewhere; which sequences have grown: on every device, or
      on none. Tokens of the others keep their place, at position -1 and without slots or keys.
    """
    rows, size = jnp.arange(pool.max_seqs, dtype=jnp.int32), pool.block_size
    context = jax.lax.psum(pool.seq_lens, AXIS)
    here = length_here(context + new, rows, size) - pool.seq_lens
    _, growth = append_tokens(pool, here, max_new_tokens=max_query_len)
    ok = jax.lax.pmin(growth.ok.astype(jnp.int32), AXIS) > 0
    grown, _ = append_tokens(pool, jnp.where(ok, here, 0), max_new_tokens=max_query_len)
    starts = jnp.append(jnp.int32(0), jnp.cumsum(new, dtype=jnp.int32))
    seqs = sequence_ids(starts, num_tokens)
    at = positions(starts, context + new, num_tokens)
    before = length_here(at, seqs, size)
    lies_here = ok[seqs] & (length_here(at + 1, seqs, size) > before)
    slot_at = jnp.where(lies_here, before, -1)
    batch = BatchMetadata(
        block_tables=grown.block_tables,
        seq_lens=jnp.where(ok, pool.seq_lens, 0),
        query_start_loc=starts,
        slot_mapping=slot_mapping(grown.block_tables, seqs, slot_at, block_size=size),
        positions=jnp.where(ok[seqs], at, -1),
        block_size=size,
        max_query_len=max_query_len,
    )
    return grown, batch, ok

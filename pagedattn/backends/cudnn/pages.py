"""Whole blocks of a cache gathered as dense sequences."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..._dispatch.call import Call
from ...batch.metadata import Sequences
from ...cache.kv_cache import KVCache


def first_pages(
    call: Call, cache: KVCache, batch: Sequences, key_lens: Int[Array, "num_seqs"]
) -> tuple[Float[Array, "num_seqs capacity num_kv_heads head_dim"], ...]:
    """Keys and values of every sequence, zeros from its key number `key_lens` on."""
    inside = (jnp.arange(call.capacity) < key_lens[:, None])[..., None, None]
    tables = batch.block_tables
    return tuple(jnp.where(inside, pages_of(plane, tables), 0) for plane in cache.planes)


def pages_of(
    plane: Float[Array, "num_blocks block_size num_kv_heads head_dim"],
    tables: Int[Array, "num_seqs max_blocks"],
) -> Float[Array, "num_seqs max_blocks*block_size num_kv_heads head_dim"]:
    """Whole blocks as dense sequences."""
    pages = plane.at[tables].get(mode="clip", wrap_negative_indices=False)
    return pages.reshape(tables.shape[0], -1, *plane.shape[2:])

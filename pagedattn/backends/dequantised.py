"""Calls over a cache that is dequantised first, by XLA."""

from dataclasses import replace

import jax.numpy as jnp

from .._dispatch.call import Call
from .._dispatch.dequantise import dequantised_cache, dequantised_call
from ..batch.metadata import Sequences
from ..cache.kv_cache import KVCache


def dequantised_first(
    call: Call, cache: KVCache, batch: Sequences
) -> tuple[Call, KVCache, Sequences]:
    """The same call over a cache of the query's dtype: a block for each entry of the tables."""
    dtype, plain = jnp.dtype(call.dtype), dequantised_call(call)
    cache = dequantised_cache(call, cache, batch.block_tables, dtype)
    blocks = jnp.arange(plain.num_blocks, dtype=jnp.int32).reshape(call.num_seqs, call.max_blocks)
    return plain, cache, replace(batch, block_tables=blocks)

"""Quantised keys and values made the query's dtype before the kernel reads them: once a call.

The kernel widens 8-bit elements for each tile of queries. Many tiles that share keys have that done
once, by XLA, in blocks of their own. Four bits it does not widen at all.
"""

from dataclasses import replace

import jax.numpy as jnp

from ...._dispatch.call import ITEM_BYTES, Call
from ....batch.metadata import Sequences
from ....cache.kv_cache import KVCache
from ....cache.quantise import dequantised

MOST_BYTES = 1 << 31  # of dequantised keys and values
# The kernel takes 1 to 1.2 ns on an H200 to widen and scale a key of 8 heads for 128 tokens, and
# XLA takes 0.8 to dequantise it for all. Tables may have room for far more keys than there are, and
# room is what is filled: for each token of the batch so much at most.
LEAST_TOKENS = 512  # of a sequence
MOST_KEYS = 32


def is_dequantised(call: Call) -> bool:
    """Whether that is faster than to widen elements in the kernel, or is the only way."""
    if call.cache_dtype in (None, "int4"):
        return call.cache_dtype == "int4"
    room = call.num_seqs * call.capacity
    long = call.num_tokens >= LEAST_TOKENS * call.num_seqs and room <= MOST_KEYS * call.num_tokens
    return long and dequantised_bytes(call) <= MOST_BYTES


def dequantised_bytes(call: Call) -> int:
    columns = call.num_kv_heads * (call.head_dim + call.out_dim)
    return call.num_seqs * call.capacity * columns * ITEM_BYTES[call.dtype]


def dequantised_call(
    call: Call, cache: KVCache, batch: Sequences
) -> tuple[Call, KVCache, Sequences]:
    """The same call of a cache in the query's dtype, which has a block for each of the tables'."""
    tables = batch.block_tables.clip(0, call.num_blocks - 1).reshape(-1)
    scales = cache.key_scale, cache.value_scale
    key, value = (
        dequantised(plane[tables], None if scale is None else scale[tables], jnp.dtype(call.dtype))
        for plane, scale in zip(cache.planes, scales, strict=True)
    )
    blocks = jnp.arange(len(tables), dtype=jnp.int32).reshape(call.num_seqs, call.max_blocks)
    plain = replace(call, cache_dtype=None, token_scales=False, num_blocks=len(tables))
    return plain, KVCache(key, value), replace(batch, block_tables=blocks)

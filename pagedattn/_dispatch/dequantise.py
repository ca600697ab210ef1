"""Quantised keys and values made the query's dtype before a kernel reads them: once a call.

Kernels convert elements for each tile of queries. Many tiles that share keys have that done once,
into memory of its own with a block for each entry of the block tables.
"""

from collections.abc import Callable
from dataclasses import replace

from ..cache.kv_cache import KVCache
from ..cache.quantise import dequantised
from .call import ITEM_BYTES, Call

MOST_BYTES = 1 << 30  # of dequantised keys and values
# On an H200 `mosaic` takes 1 to 1.2 ns to widen and scale a key of 8 heads for 128 tokens, without
# per-token scales 0.2 to 0.6. XLA takes 0.8 to dequantise it for all while the L2 cache holds what
# it writes, and beyond it some 2.5, by the bandwidth.
LEAST_TOKENS = 512  # of a sequence
LEAST_WITHOUT_SCALES = 2048
# Tables may have room for far more keys than there are, and room is what is filled: at most so much
# for each token of the batch.
MOST_KEYS = 16


def is_faster_dequantised(call: Call) -> bool:
    """Whether a kernel that reads quantised caches is likely to read a dequantised one sooner."""
    if call.cache_dtype is None or not call.strides.value:
        return False
    room = call.num_seqs * call.capacity
    least = LEAST_TOKENS if call.token_scales else LEAST_WITHOUT_SCALES
    long = call.num_tokens >= least * call.num_seqs
    return (
        long and 0 < room <= MOST_KEYS * call.num_tokens and dequantised_bytes(call) <= MOST_BYTES
    )


def dequantised_bytes(call: Call) -> int:
    columns = call.num_kv_heads * (call.head_dim + call.out_dim)
    return call.num_seqs * call.capacity * columns * ITEM_BYTES[call.dtype]


def dequantised_call(call: Call) -> Call:
    """The facts of the same call over the dequantised cache."""
    key, value = (_strides(call, columns) for columns in (call.head_dim, call.out_dim))
    return replace(
        call,
        cache_dtype=None,
        token_scales=False,
        num_blocks=call.num_seqs * call.max_blocks,
        strides=call.strides._replace(key=key, value=value),
    )


def dequantised_cache(call: Call, cache: KVCache, tables, dtype, take: Callable) -> KVCache:
    """What the blocks of tables hold, with per-token scales or none, a block for each entry.

    `take` are the rows of an array at some indices, in arrays of either framework.
    """
    blocks = tables.clip(0, call.num_blocks - 1).reshape(-1)
    scales = cache.key_scale, cache.value_scale
    return KVCache(
        *(
            dequantised(take(plane, blocks), None if scale is None else take(scale, blocks), dtype)
            for plane, scale in zip(cache.planes, scales, strict=True)
        )
    )


def _strides(call: Call, columns: int) -> tuple[int, ...]:
    slot = call.num_kv_heads * columns
    return call.block_size * slot, slot, columns, 1

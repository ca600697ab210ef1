"""Quantised keys and values made the query's dtype before a kernel reads them: once a call.

Kernels convert elements for each tile of queries. Many tiles that share keys have that done once,
into memory of its own with a block for each entry of the block tables.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ..cache.kv_cache import KVCache
from ..cache.quantise import dequantised
from .call import ITEM_BYTES, Call

MOST_BYTES = 1 << 30  # of dequantised keys and values


class Rule(NamedTuple):
    """From when on that is likely faster.

    Fields:
      tokens: of a sequence, at least.
      keys: for each token of the batch at most. Tables may have room for far more keys than there
        are, and room is what is filled.
    """

    tokens: int
    keys: int


# ns on an H200 for a key of 8 heads. To dequantise it for all queries takes XLA 0.8 while the L2
# cache holds what it writes, and beyond it some 2.5, by the bandwidth. For 128 queries `triton`
# takes 25 to read it from int4, from bfloat16 5; to widen and scale it takes `mosaic` 1.0 to 1.2,
# and without per-token scales 0.2 to 0.6.
INT4 = Rule(tokens=64, keys=128)
SCALED = Rule(tokens=512, keys=16)
UNSCALED = Rule(tokens=2048, keys=16)


def is_faster_dequantised(call: Call) -> bool:
    """Whether a kernel that reads quantised caches is likely to read a dequantised one sooner."""
    if call.cache_dtype is None or not call.strides.value:
        return False
    rule = SCALED if call.token_scales else UNSCALED
    rule = INT4 if call.cache_dtype == "int4" else rule
    room, tokens = call.num_seqs * call.capacity, call.num_tokens
    long = tokens >= rule.tokens * call.num_seqs and 0 < room <= rule.keys * tokens
    return long and dequantised_bytes(call) <= MOST_BYTES


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

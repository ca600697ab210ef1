"""Quantised keys and values made the query's dtype before a kernel reads them: once a call.

Kernels convert elements for each tile of queries. Many tiles that share keys have that done once,
into memory of its own with a block for each entry of the block tables.
"""

from dataclasses import replace
from typing import NamedTuple

from ..cache.kv_cache import KVCache
from ..cache.quantise import dequantised
from .call import ITEM_BYTES, Call


class Rule(NamedTuple):
    """From which sizes on it is likely faster to dequantise keys and values first.

    Fields:
      tokens: of a sequence, at least.
      keys: for each token of the batch at most. Tables may have room for far more keys than there
        are, and room is what is filled.
    """

    tokens: int
    keys: int


ANY = 1 << 31  # keys
NEVER = Rule(ANY, 0)


class Rules(NamedTuple):
    """Those of caches by their kind, and the most bytes that keys and values may take."""

    int4: Rule
    token_scales: Rule
    no_scales: Rule  # or per-head ones
    most_bytes: int


# ns on an H200 for a key of 8 heads. For 128 queries `triton` takes 25 to read it from int4 and 11
# with per-token scales, from bfloat16 5; to widen and scale it takes `mosaic` 0.9 to 1.2, and
# without per-token scales 0.1 to 0.2. To dequantise it for all queries XLA takes 0.8 while the L2
# cache holds what it writes and beyond it, by the bandwidth, some 2.5.
XLA = Rules(Rule(64, 128), Rule(512, 16), Rule(2048, 16), most_bytes=1 << 30)
# The kernel of torch's side reads and writes what sequences have: 1.4.
TRITON = Rules(Rule(32, ANY), Rule(64, ANY), NEVER, most_bytes=1 << 30)


def is_faster_dequantised(call: Call, rules: Rules = XLA) -> bool:
    """Whether a kernel that reads quantised caches is likely to read a dequantised one sooner.

    Not where windows hide keys: a kernel leaves those out.
    """
    if call.cache_dtype is None or not call.strides.value or call.window is not None:
        return False
    rule = rules.token_scales if call.token_scales else rules.no_scales
    rule = rules.int4 if call.cache_dtype == "int4" else rule
    tokens = min(call.num_tokens, call.num_seqs * call.longest_query)  # the others are padding
    room = call.num_seqs * call.capacity
    long = tokens >= rule.tokens * call.num_seqs and 0 < room <= rule.keys * tokens
    return long and dequantised_bytes(call) <= rules.most_bytes


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


def dequantised_cache(call: Call, cache: KVCache, tables, dtype) -> KVCache:
    """What the blocks of tables hold, a block for each entry, without per-head scales."""
    blocks = tables.clip(0, call.num_blocks - 1).reshape(-1)
    scales = (cache.key_scale, cache.value_scale) if call.token_scales else (None, None)
    return KVCache(
        *(
            dequantised(plane[blocks], None if scale is None else scale[blocks], dtype)
            for plane, scale in zip(cache.planes, scales, strict=True)
        )
    )


def _strides(call: Call, columns: int) -> tuple[int, ...]:
    slot = call.num_kv_heads * columns
    return call.block_size * slot, slot, columns, 1

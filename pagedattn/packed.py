"""Packed keys as a paged cache: blocks of one token, in order. For arrays of any framework."""

from typing import Any

from jaxtyping import Float, Integer

from .batch import BatchMetadata
from .cache import KVCache
from .ragged import PAD_SLOT, arange, namespace, token_positions


def packed_cache(
    key: Float[Any, "num_keys num_kv_heads head_dim"],
    value: Float[Any, "num_keys num_kv_heads head_dim"],
) -> KVCache:
    """Each key a block; none as one block that nobody owns."""
    if not len(key):
        key = value = key.sum(0)[None]  # the sum of nothing: zeros
    return KVCache(key[:, None], value[:, None])


def packed_batch(
    num_tokens: int,
    query_start_loc: Integer[Any, "num_seqs_plus_1"],
    key_start_loc: Integer[Any, "num_seqs_plus_1"],
    max_query_len: int,
    max_key_len: int,
) -> BatchMetadata:
    """Sequences of packed queries over packed keys, from int32 starts of both."""
    xp = namespace(key_start_loc)
    key_lens = key_start_loc[1:] - key_start_loc[:-1]
    return BatchMetadata(
        block_tables=key_start_loc[:-1, None] + arange(max_key_len, key_start_loc)[None],
        seq_lens=key_lens,
        query_start_loc=query_start_loc,
        slot_mapping=xp.full_like(arange(num_tokens, key_start_loc), PAD_SLOT),
        positions=token_positions(query_start_loc, key_lens, num_tokens),
        block_size=1,
        max_query_len=max_query_len,
    )

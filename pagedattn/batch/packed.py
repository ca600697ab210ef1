"""Packed keys as a paged cache: blocks of one token, in order. For arrays of any framework."""

from typing import Any

from jaxtyping import Float, Integer

from .._arrays.namespace import arange, namespace
from ..cache.kv_cache import KVCache
from .draft_tree import draft_tree, tree_positions
from .indices import PAD_SLOT, token_positions
from .metadata import BatchMetadata


def packed_cache(
    key: Float[Any, "num_keys num_kv_heads head_dim"],
    value: Float[Any, "num_keys num_kv_heads value_dim"],
) -> KVCache:
    """A cache over packed keys and values; one of zeros if they are empty."""
    if not len(key):
        key, value = key.sum(0)[None], value.sum(0)[None]  # one block, which no sequence owns
    return KVCache(key[:, None], value[:, None])


def packed_batch(
    num_tokens: int,
    query_start_loc: Integer[Any, "num_seqs_plus_1"],
    key_start_loc: Integer[Any, "num_seqs_plus_1"],
    max_query_len: int,
    max_key_len: int,
    parents: Integer[Any, "num_tokens"] | None = None,
) -> BatchMetadata:
    """The batch of packed queries over a `packed_cache`.

    Both starts are int32 `[num_seqs + 1]`: sequence s has the rows from entry s up to entry s + 1.
    """
    xp = namespace(key_start_loc)
    key_lens = key_start_loc[1:] - key_start_loc[:-1]
    positions, tree = token_positions(query_start_loc, key_lens, num_tokens), None
    if parents is not None:
        tree = draft_tree(parents, query_start_loc, max_query_len)
        positions = tree_positions(query_start_loc, key_lens, tree)
    return BatchMetadata(
        block_tables=key_start_loc[:-1, None] + arange(max_key_len, key_start_loc)[None],
        seq_lens=key_lens,
        query_start_loc=query_start_loc,
        slot_mapping=xp.full_like(arange(num_tokens, key_start_loc), PAD_SLOT),
        positions=positions,
        block_size=1,
        max_query_len=max_query_len,
        tree=tree,
    )

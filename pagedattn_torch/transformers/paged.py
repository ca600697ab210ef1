"""Attention over the pages of transformers' continuous batching, read where they lie."""

from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from pagedattn import AttentionSpec, BatchMetadata, KVCache
from pagedattn.ragged import cdiv, sequence_ids, token_positions

from ..attention import paged_attention, ragged_attention
from ..cache import write_kv_

IN_PLACE = "full_attention"  # sliding layers keep a ring of tokens, whose pages are in no order


def attend_paged(
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: PagedAttentionCache,
    step: dict[str, Any],
    spec: AttentionSpec,
    sinks: Tensor | None,
    backend: str | None,
) -> Tensor:
    """out `[1, num_tokens, num_heads, head_dim]` of packed `[1, heads, num_tokens, head_dim]`.

    Writes the new keys and values to the cache. `step` is what the engine hands to every layer:
    starts of queries and keys, and the places of tokens that are read and written.
    """
    allocator = cache.layer_to_allocator[layer]
    queries = query[0].transpose(0, 1)
    if allocator.layer_type != IN_PLACE:
        # Decorated there as a function, with which pyright loses a method.
        keys, values = cache.update(key, value, layer, step)  # pyright: ignore[reportAttributeAccessIssue]
        return _over_copies(queries, keys, values, step, spec, sinks, backend)[None]
    pages = KVCache(*allocator.get_cache_for_block_table(layer))
    batch = _batch(step, allocator, pages.block_size, len(queries))
    write_kv_(pages, key[0].transpose(0, 1), value[0].transpose(0, 1), batch.slot_mapping)
    return paged_attention(queries, pages, batch, spec, backend=backend, sinks=sinks)[None]


def _over_copies(queries, keys, values, step, spec, sinks, backend) -> Tensor:
    """Attention over keys that the engine has gathered; it has set the starts of this layer."""
    return ragged_attention(
        queries,
        keys[0].transpose(0, 1),
        values[0].transpose(0, 1),
        step["cu_seq_lens_q"],
        step["cu_seq_lens_k"],
        spec,
        max_query_len=step["max_length_q"],
        max_key_len=step["max_length_k"],
        backend=backend,
        sinks=sinks,
    )


def _batch(step: dict[str, Any], allocator, page_size: int, num_tokens: int) -> BatchMetadata:
    """The batch of a step, from the places of its tokens: a place is page * page_size + offset."""
    starts = step["cu_seq_lens_q"]
    key_starts = step["cu_seq_lens_k"][allocator.layer_type]
    written = step["write_index"][allocator.index]
    read = step["read_index"][allocator.index]
    seq_lens = key_starts.diff()
    # Where nothing is read, no sequence has a context: its tokens are those that it writes.
    tables = _tables(read if len(read) else written, key_starts, page_size)
    return BatchMetadata(
        block_tables=tables,
        seq_lens=seq_lens,
        query_start_loc=starts,
        slot_mapping=torch.where(sequence_ids(starts, num_tokens) >= 0, written, -1),
        positions=token_positions(starts, seq_lens, num_tokens),
        block_size=page_size,
        max_query_len=step["max_length_q"],
    )


def _tables(places: Tensor, key_starts: Tensor, page_size: int) -> Tensor:
    """The pages of each sequence in order: those of its tokens 0, page_size, 2 * page_size, ..."""
    seq_lens = key_starts.diff()
    longest = int(seq_lens.max()) if len(seq_lens) else 0
    firsts = torch.arange(cdiv(longest, page_size), device=places.device) * page_size
    used = firsts < seq_lens[:, None]
    tokens = torch.where(used, key_starts[:-1, None] + firsts, 0)
    return torch.where(used, places[tokens] // page_size, -1)

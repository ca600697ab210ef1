"""Attention over the pages of transformers' continuous batching, read where they lie."""

from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from pagedattn import AttentionSpec, BatchMetadata, KVCache
from pagedattn._arrays.namespace import cdiv
from pagedattn.batch.indices import sequence_ids, token_positions
from pagedattn.batch.packed import packed_batch, packed_cache

from ..cache import write_kv_
from .shared import shared_by_layers

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
    *,
    backend: str | None,
    batch_invariant: bool,
) -> Tensor:
    """out `[1, num_tokens, num_heads, head_dim]` of packed `[1, heads, num_tokens, head_dim]`.

    Writes the new keys and values to the cache. `step` is what the engine hands to every layer:
    starts of queries and keys, and the places of tokens that are read and written.
    """
    allocator = cache.layer_to_allocator[layer]
    queries = query[0].transpose(0, 1)
    if allocator.layer_type == IN_PLACE:
        pages = _pages(cache, allocator, layer)
        shared = shared_by_layers(
            step, allocator, lambda: _in_place(step, allocator, pages.block_size, len(queries))
        )
        slots = shared.batch.slot_mapping
        write_kv_(pages, key[0].transpose(0, 1), value[0].transpose(0, 1), slots)
    else:
        # Decorated there as a function, with which pyright loses a method; it changes the step.
        copies = cache.update(key, value, layer, dict(step))  # pyright: ignore[reportAttributeAccessIssue]
        pages = packed_cache(*(copy[0].transpose(0, 1) for copy in copies))
        shared = shared_by_layers(step, allocator, lambda: _gathered(step, allocator, len(queries)))
    choice = {"backend": backend, "batch_invariant": batch_invariant}
    return shared.attend(queries, pages, spec, sinks, **choice)[None]


def _pages(cache: PagedAttentionCache, allocator: Any, layer: int) -> KVCache:
    """The pages of a layer, as many as every layer of its allocator has.

    The pages of all layers lie in one memory, mixed, and the engine's view of a layer goes on from
    its first to the end: those of later layers are shorter.
    """
    layers = [other for other, its in cache.layer_to_allocator.items() if its is allocator]
    num_pages = len(allocator.get_cache_for_block_table(layers[-1])[0])
    return KVCache(*(plane[:num_pages] for plane in allocator.get_cache_for_block_table(layer)))


def _gathered(step: dict[str, Any], allocator, num_tokens: int) -> BatchMetadata:
    """The batch of a step over copies of its keys, one sequence behind the other."""
    kind = allocator.layer_type
    starts = step["cu_seq_lens_q"].clone(), step["cu_seq_lens_k"][kind]
    return packed_batch(num_tokens, *starts, step["max_length_q"], step["max_length_k"][kind])


def _in_place(step: dict[str, Any], allocator, page_size: int, num_tokens: int) -> BatchMetadata:
    """The batch of a step, from the places of its tokens: a place is page * page_size + offset."""
    starts = step["cu_seq_lens_q"].clone()
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

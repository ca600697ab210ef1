"""Pages of a cache gathered into rectangles of static size, without reading a length."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedattn import AttentionSpec, BatchMetadata, KVCache

from .buckets import first_blocks


@dataclass(frozen=True)
class Pages:
    """The keys that a sequence's queries may see, one sequence a row.

    key, value: `[num_seqs, num_keys, kv_heads, head_dim]`, 0 where no query may look.
    positions: absolute, `[num_seqs, num_keys]`; lens: how many of a row are the sequence's.
    """

    key: Tensor
    value: Tensor
    positions: Tensor
    lens: Tensor


def gather(cache: KVCache, batch: BatchMetadata, spec: AttentionSpec) -> Pages:
    """The visible blocks of each sequence, from the first that its window shows."""
    columns = torch.arange(num_blocks(batch, spec), device=batch.seq_lens.device)
    first = first_blocks(batch, spec)
    columns = first[:, None] + columns
    blocks = batch.block_tables.gather(1, columns.clamp(0, batch.max_blocks - 1).long())
    blocks = blocks.clamp(0, cache.num_blocks - 1).flatten()
    offsets = torch.arange(cache.block_size, device=columns.device)
    positions = (columns[..., None] * cache.block_size + offsets).flatten(1)
    outside = positions >= batch.seq_lens[:, None]
    if spec.sliding_window is not None:
        outside |= positions <= batch.context_lens[:, None] - spec.sliding_window
    key, value = (_rows(plane, blocks, outside) for plane in (cache.key, cache.value))
    return Pages(key, value, positions, batch.seq_lens - first * cache.block_size)


def num_blocks(batch: BatchMetadata, spec: AttentionSpec) -> int:
    """How many blocks a sequence's queries can see at most, by the static bounds."""
    if spec.sliding_window is None:
        return batch.max_blocks
    sides = 1 if spec.causal else 2
    seen = batch.max_query_len + sides * (spec.sliding_window - 1)
    return min(batch.max_blocks, (seen - 1) // batch.block_size + 2)


def _rows(plane, blocks, outside):
    rows = plane.index_select(0, blocks).view(*outside.shape, *plane.shape[2:])
    return rows.masked_fill_(outside[..., None, None], 0)  # a NaN would survive a weight of 0

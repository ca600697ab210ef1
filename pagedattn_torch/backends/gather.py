"""Paged keys gathered into dense rectangles, and the query heads of a group folded into rows.

All sizes follow from shapes: nothing here reads a length, which would wait for a GPU.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from pagedattn import KVCache
from pagedattn._arrays.namespace import arange
from pagedattn._dispatch.call import Call
from pagedattn.batch.metadata import Sequences
from pagedattn.masks import key_range

from ..arrays import bits


@dataclass(frozen=True)
class Pages:
    """The keys that a sequence's queries may see, one row for each sequence.

    Fields:
      key, value: 0 where no query may look; of the query's dtype, whatever the cache's.
      positions: absolute positions in the sequence.
      lens: how many keys of a row belong to the sequence.
    """

    key: Float[Tensor, "num_seqs num_keys num_kv_heads head_dim"]
    value: Float[Tensor, "num_seqs num_keys num_kv_heads head_dim"]
    positions: Int[Tensor, "num_seqs num_keys"]
    lens: Int[Tensor, "num_seqs"]


def first_keys(call: Call, batch: Sequences) -> Int[Any, "num_seqs"]:
    """The position of the first key of each sequence that any of its queries sees: `[num_seqs]`.

    In arrays of any framework.
    """
    context_lens = batch.context_lens
    return key_range(context_lens, context_lens, batch.seq_lens, False, call.window)[0]


def first_blocks(call: Call, batch: Sequences) -> Int[Tensor, "num_seqs"]:
    """The column in the block tables of the block of each `first_keys`: `[num_seqs]`."""
    return first_keys(call, batch) // call.block_size


def gather_pages(call: Call, cache: KVCache, batch: Sequences) -> Pages:
    """The keys of all visible blocks of each sequence, from the first one that its window shows."""
    columns = first_blocks(call, batch)[:, None] + arange(call.visible_blocks, batch.seq_lens)
    blocks = batch.block_tables.gather(1, columns.clamp(0, call.max_blocks - 1).long())
    blocks = blocks.clamp(0, call.num_blocks - 1).flatten()
    offsets = arange(call.block_size, columns)
    positions = (columns[..., None] * call.block_size + offsets).flatten(1)
    outside = (positions < first_keys(call, batch)[:, None]) | (
        positions >= batch.seq_lens[:, None]
    )
    dtype = getattr(torch, call.dtype)
    key, value = (_rows(plane, blocks, outside, dtype) for plane in cache.planes)
    return Pages(key, value, positions, batch.seq_lens - columns[:, 0] * call.block_size)


def _rows(
    plane: Shaped[Tensor, "num_blocks block_size num_kv_heads head_dim"],
    blocks: Int[Tensor, "rows"],
    outside: Bool[Tensor, "num_seqs num_keys"],
    dtype: torch.dtype,
) -> Float[Tensor, "num_seqs num_keys num_kv_heads head_dim"]:
    rows = bits(plane).index_select(0, blocks).view(plane.dtype).to(dtype)
    rows = rows.view(*outside.shape, *plane.shape[2:])
    return rows.masked_fill_(outside[..., None, None], 0)  # a NaN would survive a weight of 0


def fold(
    rows: Float[Tensor, "size queries heads dim"], num_kv_heads: int
) -> Float[Tensor, "size {num_kv_heads} heads//{num_kv_heads}*queries dim"]:
    """Folds `[size, queries, heads, dim]` to `[size, kv_heads, group * queries, dim]`."""
    size, queries, heads, dim = rows.shape
    group = heads // num_kv_heads
    if queries == 1:
        return rows.view(size, num_kv_heads, group, dim)
    grouped = rows.view(size, queries, num_kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    return grouped.reshape(size, num_kv_heads, group * queries, dim)


def unfold(
    rows: Float[Tensor, "size kv_heads rows *dim"], num_queries: int
) -> Float[Tensor, "size {num_queries} heads *dim"]:
    """Unfolds `[size, kv_heads, group * queries, ...]` to `[size, queries, heads, ...]`."""
    return by_group(rows, num_queries).flatten(2, 3)


def by_group(
    rows: Float[Tensor, "size kv_heads rows *dim"], num_queries: int
) -> Float[Tensor, "size {num_queries} kv_heads group *dim"]:
    """The same memory, but with the heads' axis as two: `[size, queries, kv_heads, group, ...]`."""
    if num_queries == 1:
        return rows.unsqueeze(1)
    size, kv_heads, folded, *dims = rows.shape
    apart = rows.view(size, kv_heads, folded // num_queries, num_queries, *dims)
    return apart.movedim(3, 1)


def fold_bias(added: Tensor, call: Call) -> Tensor:
    """Folds a bias `[size, 1 or heads, queries, keys]` as `fold` does queries.

    Gives `[size, 1 or kv_heads, group * queries, keys]`.
    """
    if added.shape[1] > 1:
        return added.unflatten(1, (call.num_kv_heads, call.group)).flatten(2, 3)
    return added.expand(-1, call.group, -1, -1).flatten(1, 2)[:, None]

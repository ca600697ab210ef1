"""Paged attention by PyTorch's scaled_dot_product_attention: every feature, any torch device.

Sequences of like lengths are gathered from the pages into one dense rectangle, and the query heads
of a KV head are folded into the query axis: SDPA then reads keys once a group, where enable_gqa
reads them once a head (11 times slower on CPU decode). On a CPU only so many keys are gathered at
a time as its cache holds, and the results for each part joined by their log-sum-exps. Masks are
explicit: `is_causal` aligns queries with the first keys, and so is wrong as soon as there is a
context.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pagedattn import AttentionSpec, KVCache, bias
from pagedattn.backend import Backend

from . import sdpa_kernels
from .buckets import Bucket
from .device_bias import alibi
from .grouping import make_buckets

# Gathered keys and values should stay in the CPU's cache until SDPA reads them.
SCRATCH_BYTES = 4 << 20
# Query rows (tokens x heads of a group) a call: bounds the mask, and lets a causal tile stop early.
TILE_ROWS = 768


class Call(NamedTuple):
    """What all buckets of a call share."""

    query: Tensor
    cache: KVCache
    spec: AttentionSpec
    dtype: torch.dtype  # that is computed in
    kernel: Callable
    rooms: list[tuple[Tensor, Tensor]]  # where the blocks of a plane are gathered, and widened


class Tile(NamedTuple):
    """Some queries of each sequence of a bucket, and their results for each part of the keys."""

    begin: int
    end: int
    tokens: Tensor  # [size, queries]
    query: Tensor  # folded
    parts: list[tuple[Tensor, Tensor]]


def unsupported(query, cache, batch, spec, return_lse) -> list[str]:
    return []


def run(query: Tensor, cache, batch, spec, return_lse: bool):
    num_tokens, num_heads, _ = query.shape
    # One row more than tokens: what a rectangle computes for its padding is written there.
    out = query.new_zeros(num_tokens + 1, *query.shape[1:])
    lse = query.new_full((num_tokens + 1, num_heads), -torch.inf, dtype=torch.float32)
    if num_tokens and batch.num_seqs and batch.max_blocks:
        dtype = _dtype(query)
        token_bytes = 2 * cache.num_kv_heads * cache.head_dim * dtype.itemsize
        buckets = make_buckets(batch, spec, SCRATCH_BYTES // token_bytes)
        kernel = sdpa_kernels.choose(query, spec, return_lse)
        call = Call(query, cache, spec, dtype, kernel, _rooms(cache, buckets, dtype))
        for bucket in buckets:
            _attend(call, bucket, out, lse if return_lse else None)
    return out[:num_tokens], lse[:num_tokens] if return_lse else None


BACKEND = Backend("sdpa", unsupported, run)


def _dtype(query) -> torch.dtype:
    """Torch computes float16 on a CPU several times slower than float32."""
    slow = query.device.type == "cpu" and query.dtype is torch.float16
    return torch.float32 if slow else query.dtype


def _rooms(cache, buckets, dtype) -> list[tuple[Tensor, Tensor]]:
    """Memory that all buckets use in turn: fresh memory costs page faults."""
    num_blocks = max((bucket.size * bucket.blocks_at_once for bucket in buckets), default=0)
    rooms = [cache.key.new_empty(num_blocks, *cache.key.shape[1:]) for _ in range(2)]
    return [
        (room, room if room.dtype is dtype else torch.empty_like(room, dtype=dtype))
        for room in rooms
    ]


def _attend(call, bucket: Bucket, out, lse):
    """Computes one bucket and writes its rows of out and lse."""
    tiles = list(_tiles(call, bucket))
    for span in bucket.spans():
        key, value = _gather(call, bucket, span)
        for tile in tiles:
            seen = bucket.seen_by_any(tile.begin, tile.end, span)
            if seen.first < seen.last:  # torch's flash kernel divides by the number of keys
                keys = slice(seen.first - span.first, seen.last - span.first)
                planes = key[:, :, keys], value[:, :, keys]
                tile.parts.append(_part(call, bucket, tile, seen, *planes))
    for tile in tiles:
        if tile.parts:
            results, lses = zip(*tile.parts, strict=True)
            out[tile.tokens] = _unfold(_joined(results, lses), tile).to(out.dtype)
            if lse is not None:
                lse[tile.tokens] = _unfold(torch.stack(lses).logsumexp(0), tile).to(lse.dtype)


def _tiles(call, bucket) -> Iterator[Tile]:
    tokens, num_kv_heads = bucket.tokens(len(call.query)), call.cache.num_kv_heads
    step = max(1, TILE_ROWS * num_kv_heads // call.query.shape[1])
    for begin in range(0, bucket.num_queries, step):
        rows = tokens[:, begin : begin + step]
        query = call.query[rows.clamp(max=len(call.query) - 1)].to(call.dtype)
        yield Tile(begin, begin + rows.shape[1], rows, _fold(query, num_kv_heads), [])


def _gather(call, bucket, span) -> Iterator[Tensor]:
    """Keys and values of a span as `[size, kv_heads, keys, dim]`."""
    blocks = bucket.blocks(span).clamp(0, call.cache.num_blocks - 1).flatten()
    absent = None if span.within(bucket.present()) else ~bucket.presence(span)
    planes = call.cache.key, call.cache.value
    for plane, (room, wide) in zip(planes, call.rooms, strict=True):
        pages = torch.index_select(plane, 0, blocks, out=room[: len(blocks)])
        if absent is not None:
            _clear(pages.flatten(0, 1), absent.flatten())
        if wide is not room:
            pages = wide[: len(blocks)].copy_(pages)
        yield pages.view(bucket.size, -1, *plane.shape[2:]).transpose(1, 2)


def _clear(rows, absent):
    """Zeroes what no query may look at: a NaN there survives a weight of 0."""
    if absent.device.type == "cpu":
        rows.index_fill_(0, absent.nonzero().flatten(), 0)  # touches only that
    else:
        rows.masked_fill_(absent[:, None, None], 0)  # does not wait for the GPU


def _part(call, bucket, tile, seen, key, value):
    """Out and lse of a tile's queries over some keys, folded."""
    visible = None
    if not seen.within(bucket.seen_by_all(tile.begin, tile.end)):
        visible = _visible(call.spec, bucket, tile, seen)
    added = _added(call.spec, bucket, tile, seen, visible)
    result, lse = call.kernel(tile.query, key, value, _fold_bias(added, tile), call.spec)
    if visible is None:
        return result, lse
    blind = ~visible.any(dim=2).repeat(1, tile.query.shape[2] // visible.shape[1])[:, None]
    return result.masked_fill(blind[..., None], 0), lse.masked_fill(blind, -torch.inf)


def _visible(spec, bucket, tile, seen):
    positions, keys = bucket.positions(tile.begin, tile.end, seen)
    visible = bias.visible_mask(positions, keys, spec)
    return visible & bucket.presence(seen)[:, None]


def _added(spec, bucket, tile, seen, visible):
    """What is added to the logits, `[size, 1 or heads, queries, keys]`; None if nothing is."""
    if spec.alibi_slopes is None:
        return None if visible is None else bias.additive(visible)[:, None]
    positions, keys = bucket.positions(tile.begin, tile.end, seen)
    slopes = alibi(positions, keys, spec.alibi_slopes)
    return slopes if visible is None else slopes.masked_fill_(~visible[:, None], -torch.inf)


def _joined(results, lses):
    """One result for all keys from those for some keys each."""
    if len(results) == 1:
        return results[0]
    weights = torch.stack(lses).softmax(0).nan_to_num(0)  # a row that sees no key has none
    return (torch.stack(results) * weights[..., None]).sum(0)


def _fold(query, num_kv_heads):
    """`[size, queries, heads, dim]` as `[size, kv_heads, group * queries, dim]`."""
    size, queries, num_heads, head_dim = query.shape
    query = query.view(size, queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return query.permute(0, 2, 3, 1, 4).reshape(size, num_kv_heads, -1, head_dim)


def _unfold(result, tile):
    """`[size, kv_heads, group * queries, ...]` as `[size, queries, heads, ...]`."""
    size, num_kv_heads, rows = result.shape[:3]
    queries = tile.end - tile.begin
    heads = result.reshape(size, num_kv_heads * rows // queries, queries, *result.shape[3:])
    return heads.transpose(1, 2)


def _fold_bias(added, tile):
    """The bias of folded queries: heads in the row axis, or one copy for each head of a group."""
    if added is None:
        return None
    size, heads, queries, keys = added.shape
    num_kv_heads, rows = tile.query.shape[1:3]
    if heads > 1:
        return added.reshape(size, num_kv_heads, rows, keys)
    return added.expand(size, rows // queries, queries, keys).reshape(size, 1, rows, keys)

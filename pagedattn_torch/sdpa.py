"""Paged attention by PyTorch's scaled_dot_product_attention: every feature, any torch device.

Sequences of like lengths are gathered from the pages into one dense rectangle, and the query heads
of a KV head are folded into the query axis: SDPA then reads keys once a group, where enable_gqa
reads them once a head (11 times slower on CPU decode). Masks are explicit: `is_causal` aligns
queries with the first keys, and so is wrong as soon as there is a context.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedattn import bias
from pagedattn.backend import Backend

from .buckets import Bucket, first_blocks, make_buckets
from .device_bias import alibi, aligned, exact_dtype

# Gathered keys and values should stay in the CPU's cache until SDPA reads them.
SCRATCH_BYTES = 16 << 20
# Query rows (tokens x heads of a group) a call: bounds the mask, and lets a causal tile stop early.
TILE_ROWS = 512


def unsupported(query, cache, batch, spec, return_lse) -> list[str]:
    return []


def run(query: Tensor, cache, batch, spec, return_lse: bool):
    num_tokens, num_heads, _ = query.shape
    # One row more than tokens: what a rectangle computes for its padding is written there.
    out = query.new_zeros(num_tokens + 1, *query.shape[1:])
    lse = query.new_full((num_tokens + 1, num_heads), -torch.inf, dtype=torch.float32)
    if num_tokens and batch.num_seqs and batch.max_blocks:
        kernel = _kernel(query, spec, return_lse)
        token_bytes = 2 * cache.num_kv_heads * cache.head_dim * cache.key.element_size()
        buckets = make_buckets(batch, spec, SCRATCH_BYTES // token_bytes)
        scratch = _scratch(cache, max((b.num_gathered for b in buckets), default=0))
        for bucket in buckets:
            _attend(query, cache, batch, spec, bucket, kernel, scratch, out, lse)
    return out[:num_tokens], lse[:num_tokens] if return_lse else None


BACKEND = Backend("sdpa", unsupported, run)


def _attend(query, cache, batch, spec, bucket: Bucket, kernel, scratch, out, lse):
    """Computes one bucket and writes its rows of out and lse."""
    tokens, positions = _queries(batch, bucket, len(query))
    key, value, key_positions, inside = _gather(cache, batch, spec, bucket, scratch)
    tile = max(1, TILE_ROWS * cache.num_kv_heads // query.shape[1])
    for begin in range(0, bucket.num_queries, tile):
        end = min(begin + tile, bucket.num_queries)
        first, last = bucket.key_range(begin, end, key.shape[2], spec)
        if first >= last:
            continue  # torch's flash kernel divides by the number of keys
        keys = slice(first, last)
        rows, at = tokens[:, begin:end], positions[:, begin:end]
        visible = bias.visible_mask(at, key_positions[:, keys], spec) & inside[:, None, keys]
        folded = _fold(query[rows.clamp(max=len(query) - 1)], cache.num_kv_heads)
        added = _fold_bias(_added(visible, at, key_positions[:, keys], spec), folded)
        results = kernel(folded, key[:, :, keys], value[:, :, keys], added, spec)
        seeing = visible.any(dim=2)[:, :, None]
        result, result_lse = (_unfold(result, end - begin) for result in results)
        out[rows] = torch.where(seeing[..., None], result, 0).to(out.dtype)
        lse[rows] = torch.where(seeing, result_lse, -torch.inf).to(lse.dtype)


def _queries(batch, bucket, num_tokens):
    """Token and position of each query of the rectangle; padding is token `num_tokens`."""
    offsets = torch.arange(bucket.num_queries, device=bucket.seqs.device)
    tokens = batch.query_start_loc[bucket.seqs, None] + offsets
    live = offsets < batch.query_lens[bucket.seqs, None]
    live &= (tokens >= 0) & (tokens < num_tokens)
    positions = batch.context_lens[bucket.seqs, None] + offsets
    return torch.where(live, tokens, num_tokens), positions


def _scratch(cache, num_blocks):
    """Room for the gathered blocks of one bucket, used by all: fresh memory costs page faults."""
    shape = (num_blocks, *cache.key.shape[1:])
    return cache.key.new_empty(shape), cache.value.new_empty(shape)


def _gather(cache, batch, spec, bucket, scratch):
    """Keys and values `[size, kv_heads, keys, dim]`, their positions, and which of them exist."""
    columns = first_blocks(batch, spec)[bucket.seqs, None] + torch.arange(
        bucket.num_blocks, device=bucket.seqs.device
    )
    tables = batch.block_tables[bucket.seqs]
    blocks = tables.gather(1, columns.clamp(max=tables.shape[1] - 1).long())
    blocks = blocks.clamp(0, cache.num_blocks - 1).flatten()
    offsets = torch.arange(cache.block_size, device=blocks.device)
    positions = (columns[..., None] * cache.block_size + offsets).flatten(1)
    inside = positions < batch.seq_lens[bucket.seqs, None]
    if spec.sliding_window is not None:
        context = batch.context_lens[bucket.seqs, None]
        inside &= positions > context - spec.sliding_window
    planes = zip((cache.key, cache.value), scratch, strict=True)
    key, value = (_pages(plane, blocks, inside, room) for plane, room in planes)
    return key, value, positions, inside


def _pages(plane, blocks, inside, room):
    """Blocks as dense sequences, 0 where no query may look: a NaN there survives a weight of 0."""
    pages = torch.index_select(plane, 0, blocks, out=room[: len(blocks)])
    if inside.device.type == "cpu":
        # Touches only what it zeroes, but would wait for a GPU.
        pages.flatten(0, 1).index_fill_(0, (~inside).flatten().nonzero().flatten(), 0)
    else:
        pages.masked_fill_(~inside.view(*pages.shape[:2], 1, 1), 0)
    return pages.view(*inside.shape, *plane.shape[2:]).transpose(1, 2)


def _fold(query, num_kv_heads):
    """`[size, queries, heads, dim]` as `[size, kv_heads, group * queries, dim]`."""
    size, queries, num_heads, head_dim = query.shape
    query = query.view(size, queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return query.permute(0, 2, 3, 1, 4).reshape(size, num_kv_heads, -1, head_dim)


def _unfold(result, queries):
    """`[size, kv_heads, group * queries, ...]` as `[size, queries, heads, ...]`."""
    size, num_kv_heads, rows = result.shape[:3]
    heads = result.reshape(size, num_kv_heads * rows // queries, queries, *result.shape[3:])
    return heads.transpose(1, 2)


def _added(visible, positions, key_positions, spec):
    """What is added to the logits, `[size, 1 or heads, queries, keys]`; None if nothing is."""
    if spec.alibi_slopes is not None:
        slopes = alibi(positions, key_positions, spec.alibi_slopes)
        return slopes.masked_fill_(~visible[:, None], -torch.inf)
    if visible.device.type == "cpu" and visible.all():
        return None
    return bias.additive(visible)[:, None]


def _fold_bias(added, folded):
    """The bias of folded queries: heads in the row axis, or one copy for each head of a group."""
    if added is None:
        return None
    size, heads, queries, keys = added.shape
    num_kv_heads, rows = folded.shape[1:3]
    if heads > 1:
        return added.reshape(size, num_kv_heads, rows, keys)
    return added.expand(size, rows // queries, queries, keys).reshape(size, 1, rows, keys)


def _kernel(query, spec, return_lse):
    """The fastest of torch's functions that can do what is asked, exactly."""
    if spec.logits_soft_cap is not None:
        return _plain
    if query.device.type == "cpu":
        return _flash_on_cpu
    # Elsewhere SDPA returns no lse, and takes ALiBi in the queries' dtype: bfloat16 is too coarse.
    if spec.alibi_slopes is None and not return_lse:
        return _fused
    return _efficient if query.device.type == "cuda" and query.shape[2] % 8 == 0 else _plain


def _flash_on_cpu(query, key, value, added, spec):
    # What F.scaled_dot_product_attention runs here; called directly, it gives the lse too.
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, attn_mask=added, scale=spec.scale_for(query.shape[3])
    )


def _efficient(query, key, value, added, spec):
    # One of the kernels behind F.scaled_dot_product_attention; called directly, it gives the lse.
    dtype = exact_dtype(query, spec.alibi_slopes)
    query, key, value = (part.to(dtype) for part in (query, key, value))
    added = aligned(added, dtype).expand(-1, query.shape[1], -1, -1)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, added, True, scale=spec.scale_for(query.shape[3])
    )
    return out, lse[:, :, : query.shape[2]]


def _fused(query, key, value, added, spec):
    added = None if added is None else added.to(query.dtype)
    scale = spec.scale_for(query.shape[3])
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=added, scale=scale)
    return out, out.new_zeros(out.shape[:3], dtype=torch.float32)


def _plain(query, key, value, added, spec):
    wide = torch.promote_types(query.dtype, torch.float32)
    logits = query.to(wide) @ key.to(wide).mT * spec.scale_for(query.shape[3])
    if (cap := spec.logits_soft_cap) is not None:
        logits = cap * torch.tanh(logits / cap)
    logits = logits if added is None else logits + added
    lse = logits.logsumexp(dim=3)
    weights = (logits - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return weights @ value.to(wide), lse

"""Paged attention by xFormers' kernels on CUDA, without waiting for the device.

Three routes, chosen by shapes:
- paged: short queries read the pages in place (Triton split-K). Queries stand at the end of a
  rectangle, so that sequences may bring fewer than the longest.
- packed: queries stay packed, keys are gathered (FlashAttention 2, variable lengths).
- biased: rectangles with a dense bias (CUTLASS): two-sided windows, float32, and ALiBi, which is
  computed in float32, since a distance in the dtype of half queries would be rounded.

The masks are made from device tensors and static bounds: their own constructors take lists of
lengths, which would wait for the device. xFormers reads a mask's Python lengths only where they are
those of a rectangle, and so known.
"""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from pagedattn import bias
from pagedattn.backend import Backend
from pagedattn.registry import platform_of

from .device_bias import alibi, aligned, exact_dtype
from .fmha import fmha, why_unusable
from .pages import gather

HALVES = ("bfloat16", "float16")
PAGED_QUERIES = 16  # what split-K's causal mask takes
PAGED_HEAD_DIMS = (16, 32, 64, 128, 256)
BIAS_BYTES = 256 << 20  # of the dense bias at once
# Split-K: programs at once, keys a program at most and at least, splits at most.
PROGRAMS, MOST_KEYS, LEAST_KEYS, MOST_SPLITS = 512, 4096, 256, 64


def unsupported(query, cache, batch, spec, return_lse) -> list[str]:
    """Why xFormers cannot honour a call on tensors or JAX arrays."""
    reasons = _device_reasons(query)
    if _name(query.dtype) not in (*HALVES, "float32"):
        reasons.append(f"xFormers takes {', '.join(HALVES)} and float32, not {query.dtype}")
    if cache.head_dim % 8:
        reasons.append(f"head_dim must be a multiple of 8, got {cache.head_dim}")
    if spec.logits_soft_cap is not None:
        reasons.append("logits_soft_cap: xFormers has none")
    return reasons


def run(query: Tensor, cache, batch, spec, return_lse: bool):
    num_tokens, num_heads, _ = query.shape
    if num_tokens == 0 or batch.num_seqs == 0 or batch.max_blocks == 0:
        empty = query.new_full((num_tokens, num_heads), -torch.inf, dtype=torch.float32)
        return torch.zeros_like(query), empty
    farthest = _capacity(batch) + num_tokens  # queries of cross-attention may stand before key 0
    if spec.sliding_window is not None and spec.sliding_window >= farthest:
        spec = dataclasses.replace(spec, sliding_window=None)
    attend = {"paged": _paged, "packed": _packed, "biased": _biased}[route(query, batch, spec)]
    out, lse = attend(query, cache, batch, spec)
    return out, lse if return_lse else None


def route(query, batch, spec) -> str:
    """Which kernel runs a call: by shapes, dtype and the spec only."""
    two_sided = spec.sliding_window is not None and not spec.causal
    if _name(query.dtype) not in HALVES or spec.alibi_slopes is not None or two_sided:
        return "biased"
    if (
        batch.max_query_len <= PAGED_QUERIES
        and spec.sliding_window is None
        and query.shape[2] in PAGED_HEAD_DIMS
        and batch.block_size % 16 == 0
    ):
        return "paged"
    return "packed"


BACKEND = Backend("xformers", unsupported, run)


def paged_mask(batch, num_queries: int, num_pages: int, causal: bool):
    """The mask of a rectangle of queries, right-aligned, over the pages themselves."""
    masks = fmha().attn_bias
    kind = (
        masks.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
        if causal
        else masks.PagedBlockDiagonalPaddedKeysMask
    )
    starts = _even_starts(batch, num_queries)
    queries = masks._SeqLenInfo(
        seqstart=starts[0], seqstart_py=starts[1], max_seqlen=num_queries, min_seqlen=num_queries
    )
    tables = batch.block_tables.to(torch.int32).clamp(0, num_pages - 1).contiguous()
    return kind(
        q_seqinfo=queries,
        k_seqinfo=_padded_keys(batch, batch.seq_lens, _capacity(batch)),
        block_tables=tables,
        page_size=batch.block_size,
    )


def packed_mask(batch, spec, key_lens: Tensor, padding: int, num_tokens: int):
    """The mask of packed queries over gathered keys, `padding` of them a sequence."""
    masks = fmha().attn_bias
    # FlashAttention takes a bound of 1 for a promise that each sequence has exactly one query.
    longest = max(2, min(batch.max_query_len, num_tokens))
    queries = masks._SeqLenInfo(
        seqstart=batch.query_start_loc.to(torch.int32).clamp(0, num_tokens),
        seqstart_py=[0] * batch.num_seqs + [num_tokens],
        max_seqlen=longest,
        min_seqlen=0,
    )
    infos = {"q_seqinfo": queries, "k_seqinfo": _padded_keys(batch, key_lens, padding)}
    if spec.sliding_window is not None:
        kind = masks.BlockDiagonalCausalLocalAttentionPaddedKeysMask
        return kind(**infos, _window_size=spec.sliding_window)
    if spec.causal:
        return masks.BlockDiagonalCausalWithOffsetPaddedKeysMask(**infos)
    return masks.BlockDiagonalPaddedKeysMask(**infos)


def _paged(query, cache, batch, spec):
    """Split-K over the pages; the rows of a sequence that brings fewer queries start later."""
    num_queries = min(batch.max_query_len, len(query))
    missing = num_queries - batch.query_lens
    rectangle = Rectangle(batch, -missing, range(num_queries), len(query))
    grouped = _grouped(rectangle.of(query).flatten(0, 1), cache.num_kv_heads)
    key, value = (_expanded(plane.flatten(0, 1), grouped) for plane in (cache.key, cache.value))
    mask = paged_mask(batch, num_queries, cache.num_blocks, spec.causal)
    out, lse = _call(_split_k(batch, cache.num_kv_heads), grouped, key, value, mask, spec)
    room = _room(query)
    rectangle.write(room, (out.view(-1, *query.shape[1:]), _heads_last(lse)), spec)
    return _tokens(room)


def _packed(query, cache, batch, spec):
    pages = gather(cache, batch, spec)
    grouped = _grouped(query, cache.num_kv_heads)
    key, value = (_expanded(plane.flatten(0, 1), grouped) for plane in (pages.key, pages.value))
    mask = packed_mask(batch, spec, pages.lens, pages.key.shape[1], len(query))
    out, lse = _call(fmha().flash.FwOp, grouped, key, value, mask, spec)
    lse = _heads_last(lse)
    live = torch.arange(len(query), device=query.device) < batch.query_start_loc[-1]
    seeing = live[:, None] & (lse != torch.inf)  # FlashAttention's lse of a row without keys
    return torch.where(seeing[..., None], out.view(query.shape), 0), lse.where(seeing, -torch.inf)


def _biased(query, cache, batch, spec):
    """Rectangles, a tile of queries at a time, with the heads of a group as further rows."""
    dtype = exact_dtype(query, spec.alibi_slopes)
    pages = gather(cache, batch, spec)
    pages = dataclasses.replace(pages, key=pages.key.to(dtype), value=pages.value.to(dtype))
    num_queries = min(batch.max_query_len, len(query))
    row_bytes = batch.num_seqs * query.shape[1] * pages.key.shape[1] * 4
    tile = max(1, min(num_queries, BIAS_BYTES // row_bytes))
    room = _room(query)
    for begin in range(0, num_queries, tile):
        span = range(begin, min(begin + tile, num_queries))
        rectangle = Rectangle(batch, torch.zeros_like(batch.seq_lens), span, len(query))
        results = _biased_tile(query, cache, batch, spec, pages, rectangle)
        rectangle.write(room, (part.flatten(0, 1) for part in results), spec)
    return _tokens(room)


def _biased_tile(query, cache, batch, spec, pages, rectangle):
    folded = _folded(rectangle.of(query), cache.num_kv_heads).to(pages.key.dtype)
    visible = bias.visible_mask(rectangle.positions, pages.positions, spec)
    visible &= (pages.positions < batch.seq_lens[:, None])[:, None]
    if spec.alibi_slopes is None:
        added = bias.additive(visible)
    else:
        added = alibi(rectangle.positions, pages.positions, spec.alibi_slopes)
        added = added.masked_fill_(~visible[:, None], -torch.inf)
    added = aligned(_folded_bias(added, folded), folded.dtype)
    added = added.expand(-1, cache.num_kv_heads, -1, -1)
    out, lse = _call(fmha().cutlass.FwOp, folded, pages.key, pages.value, added, spec)
    lse = lse[:, :, : folded.shape[1]]
    num_queries = rectangle.tokens.shape[1]
    return _unfolded(out.transpose(1, 2), num_queries), _unfolded(lse, num_queries)


class Rectangle:
    """Queries of every sequence as rows of one length, some of them of no query.

    Row r of a sequence is its query number `first + r`, r in `span`.
    """

    def __init__(self, batch, first: Tensor, span: range, num_tokens: int):
        self.batch, self.nowhere = batch, num_tokens
        numbers = first[:, None] + torch.arange(span.start, span.stop, device=first.device)
        self.tokens = batch.query_start_loc[:-1, None] + numbers
        self.live = (numbers >= 0) & (self.tokens < batch.query_start_loc[1:, None])
        # Inside jit starts are whatever they are.
        self.live &= (self.tokens >= 0) & (self.tokens < num_tokens)
        self.positions = batch.context_lens[:, None] + numbers

    def of(self, query: Tensor) -> Tensor:
        """`[num_seqs, rows, num_heads, head_dim]`."""
        tokens = self.tokens.clamp(0, len(query) - 1)
        return query.index_select(0, tokens.flatten()).unflatten(0, tokens.shape)

    def write(self, room, results, spec) -> None:
        """Writes the rows that see a key where their tokens are, the others to a row past them."""
        rows = torch.where(self.live & self._seeing(spec), self.tokens, self.nowhere).flatten()
        for part, result in zip(room, results, strict=True):
            part.index_copy_(0, rows, result.to(part.dtype))

    def _seeing(self, spec) -> Tensor:
        last = self.batch.seq_lens[:, None] - 1
        if spec.causal:
            return self.positions >= 0
        if spec.sliding_window is None:
            return last >= 0
        reach = spec.sliding_window - 1
        return (last >= 0) & (self.positions + reach >= 0) & (self.positions - reach <= last)


def _room(query) -> tuple[Tensor, Tensor]:
    """out and lse of tokens that see nothing, and one row more."""
    shape = (len(query) + 1, *query.shape[1:])
    lse = query.new_full(shape[:2], -torch.inf, dtype=torch.float32)
    return query.new_zeros(shape), lse


def _tokens(room):
    return tuple(part[:-1] for part in room)


def _call(op, query, key, value, mask, spec):
    inputs = (query, key, value, mask)
    attend = fmha().memory_efficient_attention_forward_requires_grad
    return attend(*inputs, scale=spec.scale_for(query.shape[-1]), op=op)


def _split_k(batch, num_kv_heads: int) -> Any:
    """Split-K with blocks of keys that divide a page, and splits that fill the GPU."""
    block_n = next(n for n in (64, 32, 16) if batch.block_size % n == 0)
    programs = batch.num_seqs * num_kv_heads
    splits = max(PROGRAMS // programs, _capacity(batch) // MOST_KEYS)
    splits = min(splits, _capacity(batch) // LEAST_KEYS, MOST_SPLITS)
    return _operator(block_n, 1 << max(0, splits.bit_length() - 1))


@functools.cache
def _operator(block_n: int, splits: int):
    # Two stages and two warps: 4.3 TB/s on an H200 where the defaults reach 3.4.
    fixed = {"BLOCK_N": block_n, "SPLIT_K": splits, "NUM_STAGES": 2, "NUM_WARPS": 2}
    return type(f"FwOp_N{block_n}_S{splits}", (fmha().triton_splitk.FwOp,), fixed)


def _device_reasons(query) -> list[str]:
    on_cuda = query.is_cuda if isinstance(query, Tensor) else platform_of(query) in ("gpu", "cuda")
    if not on_cuda:
        return ["xFormers' kernels run on CUDA only"]
    return why_unusable()


def _name(dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _capacity(batch) -> int:
    return batch.max_blocks * batch.block_size


def _even_starts(batch, length: int) -> tuple[Tensor, list[int]]:
    stop = (batch.num_seqs + 1) * length
    starts = torch.arange(0, stop, length, device=batch.seq_lens.device, dtype=torch.int32)
    return starts, list(range(0, stop, length))


def _padded_keys(batch, lens: Tensor, padding: int):
    starts, starts_py = _even_starts(batch, padding)
    return fmha().attn_bias._PaddedSeqLenInfo(
        seqstart=starts,
        seqstart_py=starts_py,
        max_seqlen=padding,
        min_seqlen=0,
        seqlen=lens.to(torch.int32).clamp(0, padding),
        seqlen_py=[padding] * batch.num_seqs,
        padding=padding,
    )


def _grouped(rows, num_kv_heads):
    """`[tokens, heads, dim]` as `[1, tokens, kv_heads, group, dim]`."""
    return rows.unflatten(1, (num_kv_heads, -1))[None]


def _expanded(plane, grouped):
    """`[keys, kv_heads, dim]` as `[1, keys, kv_heads, group, dim]`, the group without a copy."""
    return plane[None, :, :, None].expand(-1, -1, -1, grouped.shape[3], -1)


def _heads_last(lse):
    """`[1, kv_heads, group, tokens]` as `[tokens, heads]`."""
    return lse[0].flatten(0, 1).T


def _folded(rows, num_kv_heads):
    """`[size, queries, heads, dim]` as `[size, group * queries, kv_heads, dim]`."""
    grouped = rows.unflatten(2, (num_kv_heads, -1))
    return grouped.transpose(1, 3).transpose(2, 3).flatten(1, 2).contiguous()


def _unfolded(rows, num_queries):
    """`[size, kv_heads, group * queries, ...]` as `[size, queries, heads, ...]`."""
    return rows.unflatten(2, (-1, num_queries)).flatten(1, 2).transpose(1, 2)


def _folded_bias(added, folded):
    """`[size, (heads,) queries, keys]` as `[size, kv_heads, group * queries, keys]`."""
    size, rows, num_kv_heads, _ = folded.shape
    if added.ndim == 4:
        return added.reshape(size, num_kv_heads, rows, -1)
    group = rows // added.shape[1]
    return added[:, None].expand(-1, group, -1, -1).reshape(size, 1, rows, -1)

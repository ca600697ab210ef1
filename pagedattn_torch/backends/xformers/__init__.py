"""Paged attention by xFormers' kernels on CUDA, without waiting for the device.

Three routes, chosen by shapes:
- paged: short queries read the pages in place (Triton split-K). The queries are a rectangle, each
  sequence's at the end of its row, so that sequences may bring fewer than the longest.
- packed: queries stay packed, keys are gathered (FlashAttention 2, variable lengths). Quantised
  keys are converted then.
- biased: rectangles with a dense bias (CUTLASS), for two-sided windows, float32, and ALiBi. ALiBi
  is computed in float32, since half dtypes would round distances.
"""

import functools
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pagedattn import KVCache
from pagedattn._dispatch.backend import Backend
from pagedattn._dispatch.call import Call
from pagedattn.batch.metadata import Sequences
from pagedattn.masks import additive, visible_mask

from ..bias import alibi, aligned, bias_at, exact_dtype, zeroed
from ..gather import fold, fold_bias, gather_pages, unfold
from .fmha import fmha, why_unusable
from .masks import packed_mask, paged_mask
from .rectangle import Rectangle, room_for, tokens_of

SUPPORTS = frozenset(
    {"scale", "causal", "sliding_window", "alibi_slopes", "cache_dtype", "bias", "return_lse"}
)
HALVES = ("bfloat16", "float16")
PAGED_QUERIES = 16  # the most queries of a sequence that split-K's causal mask takes
PAGED_HEAD_DIMS = (16, 32, 64, 128, 256)
BIAS_BYTES = 256 << 20  # the most memory for a dense bias
# Split-K: programs that fill the GPU, most and fewest keys of a program, most splits.
PROGRAMS, MOST_KEYS, LEAST_KEYS, MOST_SPLITS = 512, 4096, 256, 64


def refusals(call: Call) -> list[str]:
    reasons = []
    if call.dtype not in (*HALVES, "float32"):
        reasons.append(f"xFormers takes {', '.join(HALVES)} and float32, not {call.dtype}")
    if call.head_dim % 8:
        reasons.append(f"head_dim must be a multiple of 8, got {call.head_dim}")
    return reasons


def run(
    call: Call,
    query: Float[Tensor, "num_tokens num_heads head_dim"],
    cache: KVCache,
    batch: Sequences,
    *,
    bias: Float[Tensor, "num_tokens heads max_keys"] | None = None,
) -> tuple[
    Float[Tensor, "num_tokens num_heads head_dim"], Float[Tensor, "num_tokens num_heads"] | None
]:
    biased = functools.partial(_biased, bias=bias)
    attend = {"paged": _paged, "packed": _packed, "biased": biased}[route(call)]
    out, lse = attend(call, query, cache, batch)
    return out, lse if call.return_lse else None


def route(call: Call) -> str:
    """Which kernel runs a call: by shapes, dtype and the spec only."""
    two_sided = call.window is not None and not call.spec.causal
    if call.dtype not in HALVES or call.adds_to_logits or two_sided:
        return "biased"
    if (
        call.longest_query <= PAGED_QUERIES
        and call.window is None
        and call.cache_dtype is None
        and call.head_dim in PAGED_HEAD_DIMS
        and call.block_size % 16 == 0
    ):
        return "paged"
    return "packed"


BACKEND = Backend("xformers", SUPPORTS, run, refusals, missing=lambda: why_unusable())


def _paged(call, query, cache, batch):
    """Split-K over the pages, on right-aligned rows of queries."""
    missing = call.longest_query - batch.query_lens
    rectangle = Rectangle(call, batch, -missing, range(call.longest_query))
    grouped = _grouped(rectangle.of(query).flatten(0, 1), call.num_kv_heads)
    key, value = (_expanded(plane.flatten(0, 1), grouped) for plane in cache.planes)
    mask = paged_mask(call, batch)
    out, lse = _attend(_split_k(call), call, grouped, key, value, mask)
    room = room_for(call, query)
    rectangle.write(room, (out.view(-1, *call.out_shape[1:]), _heads_last(lse)))
    return tokens_of(room)


def _packed(call, query, cache, batch):
    pages = gather_pages(call, cache, batch)
    grouped = _grouped(query, call.num_kv_heads)
    key, value = (_expanded(plane.flatten(0, 1), grouped) for plane in (pages.key, pages.value))
    mask = packed_mask(call, batch, pages.lens, pages.key.shape[1])
    out, lse = _attend(fmha().flash.FwOp, call, grouped, key, value, mask)
    lse = _heads_last(lse)
    live = torch.arange(call.num_tokens, device=query.device) < batch.query_start_loc[-1]
    seeing = live[:, None] & (lse != torch.inf)  # which is FlashAttention's lse of no key
    out = out.view(call.out_shape).masked_fill(~seeing[..., None], 0)
    return out, lse.where(seeing, -torch.inf)


def _biased(call, query, cache, batch, bias):
    """A tile of queries at a time, as rectangles with the heads of a group folded into rows."""
    pages = gather_pages(call, cache, batch)
    num_queries, num_keys = call.longest_query, pages.key.shape[1]
    tile = max(1, min(num_queries, BIAS_BYTES // (call.num_seqs * call.num_heads * num_keys * 4)))
    room = room_for(call, query)
    for begin in range(0, num_queries, tile):
        span = range(begin, min(begin + tile, num_queries))
        rectangle = Rectangle(call, batch, torch.zeros_like(batch.seq_lens), span)
        results = _biased_tile(call, query, batch, pages, rectangle, bias)
        rectangle.write(room, (part.flatten(0, 1) for part in results))
    return tokens_of(room)


def _biased_tile(call, query, batch, pages, rectangle, bias):
    dtype = exact_dtype(query, call)
    folded = fold(rectangle.of(query), call.num_kv_heads).transpose(1, 2).contiguous().to(dtype)
    visible = visible_mask(rectangle.positions, pages.positions, call.spec)
    visible &= (pages.positions < batch.seq_lens[:, None])[:, None]
    added = fold_bias(_added(call, rectangle, pages, visible, bias), call)
    mask = aligned(added, dtype).expand(-1, call.num_kv_heads, -1, -1)
    key, value = pages.key.to(dtype), pages.value.to(dtype)
    if bias is not None:
        key, value = (zeroed(x.transpose(1, 2), added).transpose(1, 2) for x in (key, value))
    out, lse = _attend(fmha().cutlass.FwOp, call, folded, key, value, mask)
    out, lse = out.transpose(1, 2), lse[:, :, : folded.shape[1]]
    if bias is not None:  # it may hide all keys of some heads of a token
        blind = (added == -torch.inf).all(3)
        out = out.masked_fill(blind[..., None], 0)
        lse = lse.masked_fill(blind, -torch.inf)
    num_queries = rectangle.tokens.shape[1]
    return unfold(out, num_queries), unfold(lse, num_queries)


def _added(call, rectangle, pages, visible, bias):
    """What is added to the logits: `[size, 1 or heads, queries, keys]`."""
    if not call.adds_to_logits:
        return additive(visible)[:, None]
    added = torch.zeros((), device=visible.device)
    if call.spec.alibi_slopes is not None:
        added = alibi(rectangle.positions, pages.positions, call.spec.alibi_slopes)
    if bias is not None:
        tokens = torch.where(rectangle.seeing, rectangle.tokens, -1)
        added = added + bias_at(bias, tokens, pages.positions)
    return added.masked_fill(~visible[:, None], -torch.inf)


def _attend(op, call, query, key, value, mask):
    attend = fmha().memory_efficient_attention_forward_requires_grad
    return attend(query, key, value, mask, scale=call.scale, op=op)


def _split_k(call) -> Any:
    """Split-K with blocks of keys that divide a page, and splits that fill the GPU."""
    block_n = next(n for n in (64, 32, 16) if call.block_size % n == 0)
    programs = call.num_seqs * call.num_kv_heads
    splits = max(PROGRAMS // programs, call.capacity // MOST_KEYS)
    splits = min(splits, call.capacity // LEAST_KEYS, MOST_SPLITS)
    return _operator(block_n, 1 << max(0, splits.bit_length() - 1))


@functools.cache
def _operator(block_n: int, splits: int):
    # Two stages and two warps reach 4.3 TB/s on an H200, xFormers' defaults 3.4.
    fixed = {"BLOCK_N": block_n, "SPLIT_K": splits, "NUM_STAGES": 2, "NUM_WARPS": 2}
    return type(f"FwOp_N{block_n}_S{splits}", (fmha().triton_splitk.FwOp,), fixed)


def _grouped(
    rows: Float[Tensor, "tokens heads dim"], num_kv_heads: int
) -> Float[Tensor, "1 tokens {num_kv_heads} group dim"]:
    """The query heads of a group on an axis of their own."""
    return rows.unflatten(1, (num_kv_heads, -1))[None]


def _expanded(
    plane: Float[Tensor, "keys kv_heads dim"], grouped: Float[Tensor, "1 tokens kv_heads group dim"]
) -> Float[Tensor, "1 keys kv_heads group dim"]:
    """A key for each head of a group, without a copy."""
    return plane[None, :, :, None].expand(-1, -1, -1, grouped.shape[3], -1)


def _heads_last(
    lse: Float[Tensor, "1 kv_heads group tokens"],
) -> Float[Tensor, "tokens kv_heads*group"]:
    """The log-sum-exps of packed tokens."""
    return lse[0].flatten(0, 1).T

"""Joins the partial results of split keys by their log-sum-exps."""

import triton
import triton.language as tl

from .parts import CHUNK, parts_of, sequence_of, total_steps

LOG2E = tl.constexpr(1.4426950408889634)
SIZES = ["window", "num_tokens", "num_seqs", "num_heads", "max_blocks", "wanted"]


@triton.jit(do_not_specialize=SIZES)
def merge_kernel(
    split_out,  # f32 [num_tokens + wanted * TOKENS, num_heads, VALUE_DIM]; see `split_kernel`
    split_lse,  # f32 [num_tokens + wanted * TOKENS, num_heads]
    seq_lens,
    query_start_loc,
    window,
    num_tokens,
    num_seqs,
    num_heads,
    max_blocks,
    wanted,
    out,  # [num_tokens, num_heads, VALUE_DIM]
    lse,  # f32 [num_tokens, num_heads]
    VALUE_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_STEPS: tl.constexpr,
    MAX_PARTS: tl.constexpr,  # of a row, a power of two
    WINDOW: tl.constexpr,
):
    token = tl.program_id(0) // num_heads
    head = tl.program_id(0) % num_heads
    total = total_steps(
        query_start_loc, seq_lens, window, num_tokens, num_seqs, max_blocks,
        BLOCK_SIZE, TOKENS, KEYS, WINDOW,
    )  # fmt: skip
    behind = 0  # parts before the row's own that are not the first ones of their tiles
    first = 0
    parts = 0
    for begin in range(0, num_seqs, CHUNK):
        start, query_len, _, _, steps, tiles = sequence_of(
            begin + tl.arange(0, CHUNK), query_start_loc, seq_lens, window, num_tokens, num_seqs,
            max_blocks, BLOCK_SIZE, TOKENS, KEYS, WINDOW,
        )  # fmt: skip
        seq_parts = parts_of(steps, total, wanted, MIN_STEPS, MAX_PARTS)
        stop = start + query_len
        behind += tl.sum(tl.where(stop <= token, tiles * (seq_parts - 1), 0), 0)
        mine = (start <= token) & (token < stop)  # none is that of a padding token
        first += tl.sum(tl.where(mine, start, 0), 0)
        parts += tl.sum(tl.where(mine, seq_parts, 0), 0)
    index = tl.arange(0, MAX_PARTS)
    behind += (token - first) // TOKENS * (parts - 1) + index - 1
    exists = (index < parts) & (behind < wanted)
    row = num_tokens + behind * TOKENS + (token - first) % TOKENS
    at = tl.where(index == 0, token, row).to(tl.int64) * num_heads + head

    part = tl.load(split_lse + at, mask=exists, other=float("-inf"))
    highest = tl.max(part, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2((part - shift) * LOG2E)
    total_weight = tl.sum(weights, 0)
    empty = total_weight == 0
    total_weight = tl.where(empty, 1.0, total_weight)
    dims = tl.arange(0, DIMS)
    values = tl.load(
        split_out + at[:, None] * VALUE_DIM + dims[None, :],
        mask=exists[:, None] & (dims < VALUE_DIM)[None, :],
        other=0.0,
    )
    values = tl.sum(values * (weights / total_weight)[:, None], 0)
    at = tl.program_id(0).to(tl.int64)
    tl.store(out + at * VALUE_DIM + dims, values.to(out.dtype.element_ty), mask=dims < VALUE_DIM)
    tl.store(lse + at, tl.where(empty, float("-inf"), shift + tl.log(total_weight)))

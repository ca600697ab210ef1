"""Joins the partial results of the shares by their log-sum-exps."""

import triton
import triton.language as tl

from .shares import sequence_of, share_length

LOG2E = tl.constexpr(1.4426950408889634)
SIZES = ["window", "num_tokens", "num_seqs", "num_heads", "max_blocks", "shares"]


@triton.jit(do_not_specialize=SIZES)
def merge_kernel(
    parts,  # f32 [num_tokens + shares * TOKENS, num_heads, VALUE_DIM], as `balanced_kernel` says
    part_lse,  # f32 [num_tokens + shares * TOKENS, num_heads]
    seq_lens,
    query_start_loc,
    window,
    num_tokens,
    num_seqs,
    num_heads,
    max_blocks,
    shares,
    out,  # [num_tokens, num_heads, VALUE_DIM]
    lse,  # f32 [num_tokens, num_heads]
    VALUE_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    SPLITS: tl.constexpr,  # the most parts of a row, padded to a power of two
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_STEPS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    token = tl.program_id(0) // num_heads
    head = tl.program_id(0) % num_heads
    # Where the row's tile lies in the line of all steps.
    total = 0
    before = 0
    first = 0
    steps = 0
    for begin in range(0, num_seqs, 128):
        start, query_len, _, _, seq_steps, tiles = sequence_of(
            begin + tl.arange(0, 128), query_start_loc, seq_lens, window, num_tokens, num_seqs,
            max_blocks, BLOCK_SIZE, TOKENS, KEYS, WINDOW,
        )  # fmt: skip
        total += tl.sum(seq_steps * tiles, 0)
        stop = start + query_len
        before += tl.sum(tl.where(stop <= token, seq_steps * tiles, 0), 0)
        mine = (start <= token) & (token < stop)
        first += tl.sum(tl.where(mine, start, 0), 0)
        steps += tl.sum(tl.where(mine, seq_steps, 0), 0)  # padding has none
    length = share_length(total, shares, MIN_STEPS)
    begin = before + (token - first) // TOKENS * steps
    share = begin // length + tl.arange(0, SPLITS)
    exists = (share * length < begin + steps) & (share < shares) & (steps > 0)
    row = num_tokens + share * TOKENS + (token - first) % TOKENS
    row = tl.where(share * length <= begin, token, row)
    at = row.to(tl.int64) * num_heads + head

    part = tl.load(part_lse + at, mask=exists, other=float("-inf"))
    highest = tl.max(part, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2((part - shift) * LOG2E)
    total_weight = tl.sum(weights, 0)
    empty = total_weight == 0
    total_weight = tl.where(empty, 1.0, total_weight)
    dims = tl.arange(0, DIMS)
    values = tl.load(
        parts + at[:, None] * VALUE_DIM + dims[None, :],
        mask=exists[:, None] & (dims < VALUE_DIM)[None, :],
        other=0.0,
    )
    values = tl.sum(values * (weights / total_weight)[:, None], 0)
    at = tl.program_id(0).to(tl.int64)
    tl.store(out + at * VALUE_DIM + dims, values.to(out.dtype.element_ty), mask=dims < VALUE_DIM)
    tl.store(lse + at, tl.where(empty, float("-inf"), shift + tl.log(total_weight)))

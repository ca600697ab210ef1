"""Paged attention with the keys of the whole batch cut into shares of equal work.

For batches of few or of unlike sequences. A program computes one share for one KV head: the end of
one sequence, whole ones, the beginning of another. `merge_kernel` joins the parts.
"""

import triton
import triton.language as tl

from .attention import SIZES, attend
from .shares import find_step, sequence_of, share_length, total_steps


@triton.jit(do_not_specialize=SIZES)
def balanced_kernel(
    query,  # the arguments are those of `attention_kernel`
    key,
    value,
    block_tables,
    seq_lens,
    query_start_loc,
    alibi_slopes,
    sinks,
    scale,
    cap,
    window,
    num_tokens,
    num_seqs,
    num_kv_heads,
    num_blocks,
    max_blocks,
    table_stride,
    query_token_stride,
    query_head_stride,
    block_stride,
    slot_stride,
    head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    out,  # f32 [num_tokens + shares * TOKENS, num_heads, VALUE_DIM]
    lse,  # f32 [num_tokens + shares * TOKENS, num_heads]
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    REST: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIMS: tl.constexpr,
    LATENT: tl.constexpr,
    ALIKE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_STEPS: tl.constexpr,  # of a share
    UNMASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    NEGATE: tl.constexpr,
):
    head_tiles: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    programs_a_share = num_kv_heads * head_tiles
    shares = tl.num_programs(0) // programs_a_share
    share = tl.program_id(0) // programs_a_share
    kv_head = tl.program_id(0) % programs_a_share // head_tiles
    skipped_heads = tl.program_id(0) % head_tiles * HEADS
    num_heads = num_kv_heads * GROUP
    head = kv_head * GROUP + skipped_heads
    num_tile_heads = GROUP - skipped_heads

    query += head.to(tl.int64) * (query_head_stride * STRIDE_UNIT)
    key += kv_head.to(tl.int64) * (head_stride * STRIDE_UNIT)
    value += kv_head.to(tl.int64) * (value_head_stride * STRIDE_UNIT)
    alibi_slopes += head
    sinks += head

    total = total_steps(
        query_start_loc, seq_lens, window, num_tokens, num_seqs, max_blocks,
        BLOCK_SIZE, TOKENS, KEYS, WINDOW,
    )  # fmt: skip
    length = share_length(total, shares, MIN_STEPS)
    left = tl.minimum(length, total - share * length)
    seq, done = find_step(
        share * length, query_start_loc, seq_lens, window, num_tokens, num_seqs, max_blocks,
        BLOCK_SIZE, TOKENS, KEYS, WINDOW,
    )  # fmt: skip
    while (left > 0) & (seq < num_seqs):
        start, query_len, seq_len, first_key, steps, tiles = sequence_of(
            seq, query_start_loc, seq_lens, window, num_tokens, num_seqs, max_blocks,
            BLOCK_SIZE, TOKENS, KEYS, WINDOW,
        )  # fmt: skip
        if done < steps * tiles:
            first = done // steps * TOKENS
            step = done % steps
            taken = tl.minimum(steps - step, left)
            token = (start + first).to(tl.int64)
            # A tile's first part lies where its rows would; others, which begin a share, behind.
            place = tl.where(step == 0, token, num_tokens + share.to(tl.int64) * TOKENS)
            row = place * num_heads + head
            low = first_key + step * KEYS
            attend(
                query + token * (query_token_stride * STRIDE_UNIT), key, value,
                block_tables + seq.to(tl.int64) * table_stride, alibi_slopes, sinks,
                out + row * VALUE_DIM, lse + row, scale, cap, window, first, query_len, seq_len,
                low, low + taken * KEYS, num_heads, num_tile_heads, num_blocks, step == 0,
                query_token_stride, query_head_stride, block_stride, slot_stride,
                value_block_stride, value_slot_stride,
                HEAD_DIM, DIMS, REST, VALUE_DIM, VALUE_DIMS, LATENT, ALIKE, BLOCK_SIZE,
                STRIDE_UNIT, HEADS, TOKENS, ROWS, KEYS,
                UNMASKED, CAUSAL, WINDOW, SOFT_CAP, ALIBI, SINKS, NEGATE,
            )  # fmt: skip
            done += taken
            left -= taken
        if done >= steps * tiles:
            seq += 1
            done = 0

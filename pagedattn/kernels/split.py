"""Paged attention with the keys of each tile split into parts, for few or unlike sequences.

A program computes one part for one KV head, and `merge_kernel` joins the parts of each row.
"""

import triton
import triton.language as tl

from .attention import SIZES, attend
from .parts import find_part, parts_of, sequence_of, total_steps


@triton.jit(do_not_specialize=[*SIZES, "wanted"])
def split_kernel(
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
    wanted,  # parts in all, if the work allows it
    out,  # f32 [num_tokens + wanted * TOKENS, num_heads, VALUE_DIM]
    lse,  # f32 [num_tokens + wanted * TOKENS, num_heads]
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
    MIN_STEPS: tl.constexpr,  # of a part
    MAX_PARTS: tl.constexpr,  # of a tile
    UNMASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    NEGATE: tl.constexpr,
):
    head_tiles: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    programs_a_part = num_kv_heads * head_tiles
    number = tl.program_id(0) // programs_a_part
    kv_head = tl.program_id(0) % programs_a_part // head_tiles
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
    seq, parts_before, tiles_before = find_part(
        number, total, wanted, query_start_loc, seq_lens, window, num_tokens, num_seqs, max_blocks,
        BLOCK_SIZE, TOKENS, KEYS, WINDOW, MIN_STEPS, MAX_PARTS,
    )  # fmt: skip
    if seq >= num_seqs:
        return
    start, query_len, seq_len, first_key, steps, _ = sequence_of(
        seq, query_start_loc, seq_lens, window, num_tokens, num_seqs, max_blocks,
        BLOCK_SIZE, TOKENS, KEYS, WINDOW,
    )  # fmt: skip
    parts = parts_of(steps, total, wanted, MIN_STEPS, MAX_PARTS)
    tile = tl.maximum(number - parts_before, 0) // parts
    part = tl.maximum(number - parts_before, 0) % parts
    # A tile's first part lies where its rows would, the others behind all rows, in their order.
    behind = tl.minimum(tl.maximum(number - tiles_before - tile - 1, 0), wanted - 1)
    first = tile * TOKENS
    token = (start + first).to(tl.int64)
    row = tl.where(part == 0, token, num_tokens + behind.to(tl.int64) * TOKENS) * num_heads + head
    taken = (steps + parts - 1) // parts * KEYS
    attend(
        query + token * (query_token_stride * STRIDE_UNIT), key, value,
        block_tables + seq.to(tl.int64) * table_stride, alibi_slopes, sinks,
        out + row * VALUE_DIM, lse + row, scale, cap, window, first, query_len, seq_len,
        first_key + part * taken, first_key + (part + 1) * taken, num_heads, num_tile_heads,
        num_blocks, part == 0, query_token_stride, query_head_stride, block_stride, slot_stride,
        value_block_stride, value_slot_stride,
        HEAD_DIM, DIMS, REST, VALUE_DIM, VALUE_DIMS, LATENT, ALIKE, BLOCK_SIZE, STRIDE_UNIT,
        HEADS, TOKENS, ROWS, KEYS, UNMASKED, CAUSAL, WINDOW, SOFT_CAP, ALIBI, SINKS, NEGATE,
    )  # fmt: skip

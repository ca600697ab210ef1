"""Paged attention in Triton: one kernel for decode, prefill, chunks and any mix.

A program computes a tile of rows for one KV head. Its rows are tokens x query heads of the group,
so that a key is loaded once for the whole group. It walks all keys that any of its rows sees or,
where the keys are split, its share of them. Padding tokens count as one more sequence, without
keys.
"""

import triton
import triton.language as tl

from .tile import attend, nothing_seen, store_rows

# Not specialised: Triton would compile anew when one of these is 1 or a multiple of 16.
SIZES = [
    *("window", "num_tokens", "num_seqs", "num_kv_heads", "num_blocks", "max_blocks"),
    *("table_stride", "query_token_stride", "query_head_stride"),
    *("block_stride", "slot_stride", "head_stride"),
    *("value_block_stride", "value_slot_stride", "value_head_stride"),
]


@triton.jit(do_not_specialize=SIZES)
def attention_kernel(
    query,  # [num_tokens, num_kv_heads * GROUP, HEAD_DIM]
    key,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]; of any dtype
    value,  # [num_blocks, BLOCK_SIZE, num_kv_heads, VALUE_DIM]; any array when LATENT
    block_tables,  # i32 [num_seqs, max_blocks]
    seq_lens,  # i32 [num_seqs]
    query_start_loc,  # i32 [num_seqs + 1]
    alibi_slopes,  # f32 [num_heads]; any array when not ALIBI
    sinks,  # f32 [num_heads]; any array when not SINKS
    scale,  # factor on the dot product, never negative; the launch puts 1 / cap or log2(e) into it
    cap,  # 0 unless SOFT_CAP; the launch puts log2(e) into it unless ALIBI
    window,
    num_tokens,
    num_seqs,
    num_kv_heads,
    num_blocks,
    max_blocks,
    table_stride,
    query_token_stride,  # this and the next strides count units of STRIDE_UNIT elements
    query_head_stride,
    block_stride,
    slot_stride,
    head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    out,  # [splits, num_tokens, num_heads, VALUE_DIM]
    lse,  # f32 [splits, num_tokens, num_heads]
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,  # columns of the keys' first tile
    REST: tl.constexpr,  # columns of their second tile, or 0
    VALUE_DIM: tl.constexpr,
    VALUE_DIMS: tl.constexpr,  # columns of the values' tile
    LATENT: tl.constexpr,  # the values are the keys' first tile
    ALIKE: tl.constexpr,  # the values have the keys' strides
    BLOCK_SIZE: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,  # tells the compiler what divides the strides: loads are then wide
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,  # query heads of a tile: all of the group if they fit
    TOKENS: tl.constexpr,  # tokens of a tile
    ROWS: tl.constexpr,  # rows of a tile: at least TOKENS * HEADS
    FEW_TOKENS: tl.constexpr,  # tiles of at most so many tokens, as of decodes in a mixed batch,
    FEW_ROWS: tl.constexpr,  # compute only so many rows; 0: all tiles compute ROWS
    KEYS: tl.constexpr,  # keys of one step of the walk
    TILES_A_SEQ: tl.constexpr,  # tiles given to each sequence; 0 finds the sequence by search
    SPLIT: tl.constexpr,  # whether the grid's second axis splits the keys, for `merge_kernel`
    MIN_STEPS: tl.constexpr,  # steps below which keys are not split further
    APART: tl.constexpr,  # more warps than rows for them: they share the keys of a step; see `walk`
    UNMASKED: tl.constexpr,  # whether steps that all rows see wholly get a loop without masks
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    NEGATE: tl.constexpr,  # the scale is negative
    PAIRS: tl.constexpr,  # whether keys and values are read as eight_bits.py reads them
    SMALL: tl.constexpr,  # offsets in the cache fit into 32 bits, which saves registers
):
    head_tiles: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    programs_a_tile = num_kv_heads * head_tiles
    num_tiles = tl.num_programs(0) // programs_a_tile
    tile = tl.program_id(0) // programs_a_tile
    kv_head = tl.program_id(0) % programs_a_tile // head_tiles
    skipped_heads = tl.program_id(0) % head_tiles * HEADS
    num_heads = num_kv_heads * GROUP

    # After this `tile` is the tile's number within its sequence `seq`.
    if TILES_A_SEQ == 0:
        # The last tiles of a sequence walk the most keys: started first, they do not end last.
        tile = num_tiles - 1 - tile
        seq = find_sequence(query_start_loc, num_seqs, tile, TOKENS)
        tile -= tl.load(query_start_loc + seq) // TOKENS + seq
    else:
        seq = tl.minimum(tile // TILES_A_SEQ, num_seqs)
        tile -= seq * TILES_A_SEQ
    first = tl.maximum(tile * TOKENS, 0)
    query_start = tl.load(query_start_loc + seq)
    if TILES_A_SEQ > 0:  # noqa: SIM102  (the kernel is compiled with or without it)
        if seq == num_seqs:
            query_start = highest_start(query_start_loc, num_seqs)
    query_stop = tl.load(query_start_loc + seq + 1, mask=seq < num_seqs, other=num_tokens)
    seq_len = tl.load(seq_lens + seq, mask=seq < num_seqs, other=0)
    # Values that break the contract must not lead outside the arrays.
    query_start = tl.minimum(tl.maximum(query_start, 0), num_tokens)
    query_len = tl.minimum(tl.maximum(query_stop, 0), num_tokens) - query_start
    seq_len = tl.minimum(tl.maximum(seq_len, 0), max_blocks * BLOCK_SIZE)

    # From here on pointers start at the tile's first token and head, and at its KV head.
    head = kv_head * GROUP + skipped_heads
    token = (query_start + first).to(tl.int64)
    row = (tl.program_id(1) * num_tokens + token) * num_heads + head
    query += token * (query_token_stride * STRIDE_UNIT)
    query += head.to(tl.int64) * (query_head_stride * STRIDE_UNIT)
    out += row * VALUE_DIM
    lse += row
    alibi_slopes += head
    sinks += head
    has_sinks = seq < num_seqs  # padding has none
    key += kv_head.to(tl.int64) * (head_stride * STRIDE_UNIT)
    value += kv_head.to(tl.int64) * (value_head_stride * STRIDE_UNIT)
    table = block_tables + seq.to(tl.int64) * table_stride
    num_tile_heads = GROUP - skipped_heads

    if TILES_A_SEQ > 0:  # noqa: SIM102  (the kernel is compiled with or without it)
        if seq == num_seqs:
            # The programs past the last sequence store the rows of all padding tokens, in turns.
            stride = (num_tiles - num_seqs * TILES_A_SEQ) * TOKENS
            nothing = tl.zeros([ROWS, VALUE_DIMS], tl.float32)
            for skipped in range(0, query_len - first, stride):
                store_rows(
                    out, lse, nothing, nothing_seen(ROWS), skipped, query_len - first,
                    num_heads, num_tile_heads, VALUE_DIM, VALUE_DIMS, TOKENS, HEADS, ROWS,
                )  # fmt: skip
            return
    if first >= query_len:
        return
    # `fmt: skip`, here and below: with one argument a line the calls would fill pages.
    if FEW_ROWS > 0:  # noqa: SIM102  (as above)
        if query_len - first <= FEW_TOKENS:
            attend(
                query, key, value, table, alibi_slopes, sinks, out, lse, scale, cap, window,
                first, query_len, seq_len, num_heads, num_tile_heads, num_blocks, has_sinks,
                query_token_stride, query_head_stride, block_stride, slot_stride,
                value_block_stride, value_slot_stride,
                HEAD_DIM, DIMS, REST, VALUE_DIM, VALUE_DIMS, LATENT, ALIKE, BLOCK_SIZE,
                STRIDE_UNIT, HEADS, FEW_TOKENS, FEW_ROWS, KEYS, SPLIT, MIN_STEPS, False, False,
                CAUSAL, WINDOW, SOFT_CAP, ALIBI, SINKS, NEGATE, PAIRS, SMALL,
            )  # fmt: skip
            return
    attend(
        query, key, value, table, alibi_slopes, sinks, out, lse, scale, cap, window,
        first, query_len, seq_len, num_heads, num_tile_heads, num_blocks, has_sinks,
        query_token_stride, query_head_stride, block_stride, slot_stride,
        value_block_stride, value_slot_stride,
        HEAD_DIM, DIMS, REST, VALUE_DIM, VALUE_DIMS, LATENT, ALIKE, BLOCK_SIZE, STRIDE_UNIT,
        HEADS, TOKENS, ROWS, KEYS, SPLIT, MIN_STEPS, APART, UNMASKED, CAUSAL, WINDOW, SOFT_CAP,
        ALIBI, SINKS, NEGATE, PAIRS, SMALL,
    )  # fmt: skip


@triton.jit
def find_sequence(query_start_loc, num_seqs, tile, TOKENS: tl.constexpr):
    """The sequence of a tile: the last one whose tiles begin at or before it.

    Sequence s begins at tile `query_start_loc[s] // TOKENS + s`, which leaves each sequence enough
    tiles and wastes at most one; nothing but shapes is needed to launch them.
    """
    low = 0
    high = num_seqs  # the padding counts as a sequence
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start_loc + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def highest_start(query_start_loc, num_seqs):
    """Where the last sequence ends and the padding begins, also if the starts are padded with 0."""
    highest = tl.load(query_start_loc)
    for begin in range(0, num_seqs + 1, 128):
        at = begin + tl.arange(0, 128)
        starts = tl.load(query_start_loc + at, mask=at <= num_seqs, other=0)
        highest = tl.maximum(highest, tl.max(starts, 0))
    return highest

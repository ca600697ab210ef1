"""Paged attention in Triton: one kernel for decode, prefill, chunks and any mix.

A program computes a tile of rows for one KV head. Its rows are tokens x query heads of the group,
so that a key is loaded once for the whole group. It walks all keys that any of its rows sees or,
where the keys are split, its share of them. Padding tokens count as one more sequence, without
keys.
"""

import triton
import triton.language as tl

from .eight_bits import half_query
from .walk import walk

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


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
    if TILES_A_SEQ > 0:  # noqa: SIM102 (the kernel is compiled with or without it)
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

    if TILES_A_SEQ > 0:  # noqa: SIM102 (the kernel is compiled with or without it)
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
    if FEW_ROWS > 0:  # noqa: SIM102
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
def attend(
    query, key, value, table, alibi_slopes, sinks, out, lse, scale, cap, window,
    first, query_len, seq_len, num_heads, num_tile_heads, num_blocks, has_sinks,
    query_token_stride, query_head_stride, block_stride, slot_stride,
    value_block_stride, value_slot_stride,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, REST: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_DIMS: tl.constexpr, LATENT: tl.constexpr, ALIKE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, SPLIT: tl.constexpr, MIN_STEPS: tl.constexpr, APART: tl.constexpr,
    UNMASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr, SINKS: tl.constexpr, NEGATE: tl.constexpr, PAIRS: tl.constexpr,
    SMALL: tl.constexpr,
):  # fmt: skip
    """Computes one tile: the tokens of a sequence from `first` on, for a KV head's query heads."""
    rows = tl.arange(0, ROWS)
    tokens = rows // HEADS
    heads = rows % HEADS
    left = query_len - first
    exists = (tokens < tl.minimum(left, TOKENS)) & (heads < num_tile_heads)

    # [begin, end) are the keys that any row of the tile sees.
    first_position = seq_len - left
    last_position = first_position + tl.minimum(left, TOKENS) - 1
    begin = 0
    end = seq_len
    if CAUSAL:
        end = tl.minimum(end, last_position + 1)
    elif WINDOW:
        end = tl.minimum(end, last_position + window)
    if WINDOW:
        begin = tl.maximum(begin, first_position - window + 1)

    start = begin // KEYS * KEYS
    stop = end
    if SPLIT:
        # This split's share of the keys, in whole steps; of few keys, the last splits get none.
        steps = tl.maximum(end - start + KEYS - 1, 0) // KEYS
        share = tl.maximum(tl.cdiv(steps, tl.num_programs(1)), MIN_STEPS)
        start += tl.program_id(1) * share * KEYS
        stop = tl.minimum(start + share * KEYS, end)
        nothing = start >= stop
        if SINKS:
            nothing = nothing & (tl.program_id(1) > 0)  # the first split has the sinks
        if nothing:
            # No out is stored: the merge ignores it where the log-sum-exp is -inf.
            tl.store(lse + tokens * num_heads + heads, nothing_seen(ROWS), mask=exists)
            return

    query += tokens.to(tl.int64)[:, None] * (query_token_stride * STRIDE_UNIT)
    query += heads.to(tl.int64)[:, None] * (query_head_stride * STRIDE_UNIT)
    q = load_query(query, exists, 0, DIMS, HEAD_DIM, NEGATE)
    if PAIRS:
        q, factors = half_query(q)
        scale = scale * factors
    q_rest = q
    if REST > 0:
        q_rest = load_query(query, exists, DIMS, REST, HEAD_DIM, NEGATE)
    slopes = tl.zeros([ROWS], tl.float32)
    if ALIBI:
        slopes = tl.load(alibi_slopes + heads, mask=exists, other=0.0)

    positions = first_position + tokens
    highest = nothing_seen(ROWS)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        # The softmax begins with a logit that has no value.
        mask = exists & has_sinks & (tl.program_id(1) == 0)
        highest = tl.load(sinks + heads, mask=mask, other=float("-inf"))
        total = tl.where(highest > float("-inf"), 1.0, 0.0)
        if not ALIBI:
            highest *= LOG2E
    summed = tl.zeros([ROWS, VALUE_DIMS // 2 if PAIRS else VALUE_DIMS], tl.float32)
    odd = summed
    if UNMASKED:
        # Before `middle` no mask is needed: the first row sees all keys, and so do the others.
        middle = end
        if CAUSAL:
            middle = tl.maximum(tl.minimum(end, first_position + 1), 0)
        middle = tl.minimum(tl.maximum(middle // KEYS * KEYS, start), stop)
        highest, total, summed, odd = walk(
            highest, total, summed, odd, start, middle, begin, end, q, q_rest, key, value, table,
            positions, slopes, scale, cap, window, num_blocks, block_stride, slot_stride,
            value_block_stride, value_slot_stride,
            HEAD_DIM, DIMS, REST, VALUE_DIM, VALUE_DIMS, LATENT, ALIKE, BLOCK_SIZE, STRIDE_UNIT,
            KEYS, APART, False, CAUSAL, WINDOW, SOFT_CAP, ALIBI, PAIRS, SMALL,
        )  # fmt: skip
        start = middle
    highest, total, summed, odd = walk(
        highest, total, summed, odd, start, stop, begin, end, q, q_rest, key, value, table,
        positions, slopes, scale, cap, window, num_blocks, block_stride, slot_stride,
        value_block_stride, value_slot_stride,
        HEAD_DIM, DIMS, REST, VALUE_DIM, VALUE_DIMS, LATENT, ALIKE, BLOCK_SIZE, STRIDE_UNIT, KEYS,
        APART, True, CAUSAL, WINDOW, SOFT_CAP, ALIBI, PAIRS, SMALL,
    )  # fmt: skip
    if PAIRS:
        summed = tl.reshape(tl.join(summed, odd), [ROWS, VALUE_DIMS])

    empty = total == 0
    total = tl.where(empty, 1.0, total)
    # Without ALiBi the logits are in base 2: see `walk`.
    log_total = highest + tl.log(total) if ALIBI else (highest + tl.log2(total)) * LN2
    store_rows(
        out, lse, summed / total[:, None], tl.where(empty, float("-inf"), log_total), 0, left,
        num_heads, num_tile_heads, VALUE_DIM, VALUE_DIMS, TOKENS, HEADS, ROWS,
    )  # fmt: skip


@triton.jit
def load_query(
    rows, exists, FIRST: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr,
    NEGATE: tl.constexpr,
):  # fmt: skip
    """`[ROWS, WIDTH]`: the columns of the rows' queries from FIRST on."""
    dims = FIRST + tl.arange(0, WIDTH)
    q = tl.load(rows + dims[None, :], mask=exists[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    return -q if NEGATE else q


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


@triton.jit
def nothing_seen(ROWS: tl.constexpr):
    return tl.full([ROWS], float("-inf"), tl.float32)


@triton.jit
def store_rows(
    out, lse, values, log_total, skipped, left, num_heads, num_tile_heads,
    VALUE_DIM: tl.constexpr, VALUE_DIMS: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Stores the tile that begins `skipped` tokens later; `left` tokens of the sequence exist."""
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, VALUE_DIMS)
    tokens = rows // HEADS
    heads = rows % HEADS
    exists = (tokens < TOKENS) & (tokens + skipped < left) & (heads < num_tile_heads)
    row = (tokens + skipped).to(tl.int64) * num_heads + heads
    tl.store(
        out + row[:, None] * VALUE_DIM + dims[None, :],
        values.to(out.dtype.element_ty),
        mask=exists[:, None] & (dims < VALUE_DIM)[None, :],
    )
    tl.store(lse + row, log_total, mask=exists)

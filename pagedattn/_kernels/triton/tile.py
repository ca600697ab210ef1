"""Attention of one tile: the keys that its rows see, its queries, the walk, and what is stored."""

import triton
import triton.language as tl

from .eight_bits import half_query
from .online_softmax import walk

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


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

"""Scores of blocks, whose summaries are read once, and the choice of the best of them."""

import triton
import triton.language as tl

LEAST = tl.constexpr(-(1 << 31))  # of int32


@triton.jit
def scores_kernel(
    queries,  # [PLANES, NUM_SEQS, ROWS, KV_HEADS, HEAD_DIM], for each plane
    num_rows,  # i32 [NUM_SEQS]
    first,  # [num_blocks, KV_HEADS, HEAD_DIM], of the queries' dtype or float8_e4m3fn
    second,  # as the first; any array of one plane
    blocks,  # i32 [NUM_SEQS, COLUMNS], -1 for none
    scores,  # f32 [NUM_SEQS, KV_HEADS, COLUMNS]
    NUM_SEQS: tl.constexpr,
    ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PLANES: tl.constexpr,
    DIMS: tl.constexpr,  # HEAD_DIM padded to a power of two
    TILE: tl.constexpr,  # columns
    ROWS_AT_ONCE: tl.constexpr,
):
    """The greatest product of any row with each block: the sum of those with its planes."""
    seq = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    head = tl.program_id(0) % KV_HEADS
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    dims = tl.arange(0, DIMS)
    block = tl.load(blocks + seq * COLUMNS + columns, mask=columns < COLUMNS, other=-1)
    held = (block >= 0)[:, None] & (dims < HEAD_DIM)[None, :]
    of_block = (block.to(tl.int64) * KV_HEADS + head) * HEAD_DIM
    offsets = of_block[:, None] + dims[None, :]
    low = tl.load(first + offsets, mask=held, other=0.0)
    high = low
    if PLANES == 2:
        high = tl.load(second + offsets, mask=held, other=0.0)
    low, high = low.to(queries.dtype.element_ty), high.to(queries.dtype.element_ty)
    count = tl.load(num_rows + seq)
    best = tl.full([TILE], float("-inf"), tl.float32)
    for begin in range(0, ROWS, ROWS_AT_ONCE):
        rows = begin + tl.arange(0, ROWS_AT_ONCE)
        at = ((seq * ROWS + rows) * KV_HEADS + head) * HEAD_DIM
        at = at[:, None] + dims[None, :]
        exists = (rows < ROWS)[:, None] & (dims < HEAD_DIM)[None, :]
        query = tl.load(queries + at, mask=exists, other=0.0)
        products = tl.dot(low, tl.trans(query), input_precision="ieee")
        if PLANES == 2:
            other = queries + NUM_SEQS * ROWS * KV_HEADS * HEAD_DIM
            query = tl.load(other + at, mask=exists, other=0.0)
            products = tl.dot(high, tl.trans(query), products, input_precision="ieee")
        products = tl.where((rows < count)[None, :], products, float("-inf"))
        best = tl.maximum(best, tl.max(products, 1))
    best = tl.where(block >= 0, best, float("-inf"))
    out = scores + (seq * KV_HEADS + head) * COLUMNS + columns
    tl.store(out, best, mask=columns < COLUMNS)


@triton.jit
def choice_kernel(
    scores,  # f32 [rows, COLUMNS]
    chosen,  # i32 [rows, CHOSEN]
    COLUMNS: tl.constexpr,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,  # COLUMNS padded to a power of two
    PLACES: tl.constexpr,  # CHOSEN padded to a power of two
):
    """The columns of a row's CHOSEN largest scores above -inf in ascending order, then -1.

    The least of them is found bit by bit; what is above it is taken, and of its equals the first.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    at = scores + row * COLUMNS + columns
    score = tl.load(at, mask=columns < COLUMNS, other=float("-inf"))
    bits = score.to(tl.int32, bitcast=True)
    good = score > float("-inf")
    # Integers that are ordered as the numbers are.
    order = tl.where(good, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), LEAST)
    least = tl.where(tl.sum((order >= 0).to(tl.int32), 0) >= CHOSEN, 0, LEAST)
    for bit in range(31):  # below the sign
        higher = least | (1 << (30 - bit))
        enough = tl.sum((order >= higher).to(tl.int32), 0) >= CHOSEN
        least = tl.where(enough, higher, least)
    above = good & (order > least)
    equal = good & (order == least)
    left = CHOSEN - tl.sum(above.to(tl.int32), 0)
    taken = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= left))
    place = tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(chosen + row * CHOSEN + place, columns, mask=taken)
    places = tl.arange(0, PLACES)
    missing = (places >= tl.sum(taken.to(tl.int32), 0)) & (places < CHOSEN)
    tl.store(chosen + row * CHOSEN + places, tl.full([PLACES], -1, tl.int32), mask=missing)

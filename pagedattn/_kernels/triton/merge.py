"""Joins the partial results of split keys: by their log-sum-exps, or segments in order."""

# Constants are NamedTuples here, which the type `constexpr` does not say.
# pyright: reportAttributeAccessIssue=false

import triton
import triton.language as tl

from .online_softmax import State
from .scales import head_scale
from .states import finished, join_states

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def merge_kernel(
    parts,  # out f32 [num_splits, num_rows, HEAD_DIM], unspecified where lse is -inf, and this lse
    num_rows,  # tokens x heads
    num_splits,
    results,  # out [num_rows, HEAD_DIM], and lse f32 [num_rows]
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    SPLITS: tl.constexpr,  # num_splits padded to a power of two
    EAGER: tl.constexpr,  # read all parts without waiting to learn which of them hold something
):
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, DIMS)
    at = splits.to(tl.int64) * num_rows + row
    part = tl.load(parts.lse + at, mask=splits < num_splits, other=float("-inf"))
    highest = tl.max(part, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2((part - shift) * LOG2E)
    total = tl.sum(weights, 0)
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    wanted = splits < num_splits if EAGER else part > float("-inf")
    values = tl.load(
        parts.out + at[:, None] * HEAD_DIM + dims[None, :],
        mask=wanted[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    values = tl.where((part > float("-inf"))[:, None], values, 0.0)
    values = tl.sum(values * (weights / total)[:, None], 0)
    out = results.out + row * HEAD_DIM + dims
    tl.store(out, values.to(results.out.dtype.element_ty), mask=dims < HEAD_DIM)
    tl.store(results.lse + row, tl.where(empty, float("-inf"), shift + tl.log(total)))


@triton.jit(do_not_specialize=["num_rows", "num_parts", "value_scale_stride"])
def join_kernel(
    parts,  # `Parts`: out f32 [num_parts, num_rows, HEAD_DIM], lse [.., 2, num_rows]: `store_part`
    num_rows,  # tokens x heads
    num_parts,
    value_scale_stride,
    results,  # out [num_rows, HEAD_DIM], and lse f32 [num_rows]
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ALIBI: tl.constexpr,
    PARTS: tl.constexpr,  # of a segment; before the first one is the state before any key
    MOST: tl.constexpr,  # num_parts padded to a power of two
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    BY_HEADS: tl.constexpr,  # whether values have per-head scales
):
    row = tl.program_id(0).to(tl.int64)
    apart = num_rows.to(tl.int64)
    dims = tl.arange(0, DIMS)
    inside = (dims < HEAD_DIM)[None, :]
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    summed = tl.zeros([1, DIMS], tl.float32)
    top, weight, values = highest, total, summed
    # Which part is the last one with keys is learned at once. Those before it are read without
    # waiting for what they hold: loads of the next ones are under way meanwhile.
    every = tl.arange(0, MOST)
    tops = parts.lse + 2 * every * apart + row
    tops = tl.load(tops, mask=every < num_parts, other=float("-inf"))
    seen_parts = tl.max(tl.where(tops > float("-inf"), every + 1, 0), 0)
    # As measured: where there are many, exponentials of several are computed while sums wait.
    STAGES: tl.constexpr = 8 if MOST > 16 else 4
    UNROLLED: tl.constexpr = 4 if MOST > 64 else 1
    for part in tl.range(0, seen_parts, num_stages=STAGES, loop_unroll_factor=UNROLLED):
        at = part * apart + row
        of = parts.lse + 2 * part * apart + row + tl.arange(0, 1)
        part_top = tl.load(of)
        seen = part_top > float("-inf")
        part_weight = tl.where(seen, tl.load(of + apart), 0.0)
        columns = tl.load(parts.out + at * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
        columns = tl.where(seen[:, None], columns, 0.0)
        segment = State(highest=part_top, total=part_weight, sums=(columns,))
        if PARTS > 1:
            before = State(highest=top, total=weight, sums=(values,))
            segment = join_states(before, segment, ALIBI)
        top, weight, values = segment.highest, segment.total, segment.sums[0]
        if part % PARTS == 0:
            joined = State(highest=highest, total=total, sums=(summed,))
            joined = join_states(joined, segment, ALIBI)
            highest, total, summed = joined.highest, joined.total, joined.sums[0]
            top = tl.full([1], float("-inf"), tl.float32)
            weight = tl.zeros([1], tl.float32)
            values = tl.zeros([1, DIMS], tl.float32)
    joined = State(highest=highest, total=total, sums=(summed,))
    segment = State(highest=top, total=weight, sums=(values,))
    joined = join_states(joined, segment, ALIBI)
    over, log_total = finished(joined.highest, joined.total, ALIBI)
    out = results.out + row * HEAD_DIM + dims[None, :]
    values = joined.sums[0] / over[:, None]
    if BY_HEADS:
        values *= head_scale(parts.value_scale, value_scale_stride, row % HEADS // GROUP)
    tl.store(out, values.to(results.out.dtype.element_ty), mask=inside)
    tl.store(results.lse + row + tl.arange(0, 1), log_total)

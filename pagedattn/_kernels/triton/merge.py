"""Joins the partial results of split keys by their log-sum-exps."""

import triton
import triton.language as tl

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

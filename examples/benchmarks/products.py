"""One product of matrices in Triton, to compare the bits of instructions."""

import triton
import triton.language as tl


@triton.jit
def product_kernel(a, b, out, ROWS: tl.constexpr):
    """`out = a @ b.T`, of 64 x 128 by 64 x 128, in programs of so many rows."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns, inner = tl.arange(0, 64), tl.arange(0, 128)
    left = tl.load(a + rows[:, None] * 128 + inner[None, :])
    right = tl.load(b + columns[:, None] * 128 + inner[None, :])
    tl.store(out + rows[:, None] * 64 + columns[None, :], tl.dot(left, tl.trans(right)))

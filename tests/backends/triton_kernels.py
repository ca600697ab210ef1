"""A kernel of a user's own, in a file of its own: Triton reads the source."""

import pytest

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def double_kernel(x, out, SIZE: tl.constexpr):
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + index, 2 * tl.load(x + index))

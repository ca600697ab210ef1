"""Where Triton puts what instructions across threads rely on: `make test-targets`."""

import re

import pytest

pytest.importorskip("triton", minversion="3.5")
from calls import Attention, on, started
from gpus import GPUS

from pagedattn import AttentionSpec
from pagedattn._kernels.triton.int4_decode import LAYOUT_IS_KNOWN

pytestmark = [
    pytest.mark.targets,
    pytest.mark.skipif(not LAYOUT_IS_KNOWN.value, reason="Triton moves weights itself"),
]

FOUR = {"cache_dtype": "int4", "token_scales": True}
CALLS = {
    "group of 4": Attention(**FOUR),
    "group of 8": Attention(num_heads=64, **FOUR),
    "window and cap": Attention(
        spec=AttentionSpec(sliding_window=1000, logits_soft_cap=30.0), **FOUR
    ),
}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", CALLS)
def test_tiles_are_transposed_where_they_lie_in_a_warp(gpu, name):
    """`movmatrix` takes the two elements 2 i and 2 i + 1 of row j from thread 4 j + i."""
    with on(GPUS[gpu]):
        text = started(CALLS[name]).programs[0].asm["ttgir"]
    moved = re.findall(r"movmatrix.* -> tensor<[^,]*, (#\w+)>", text)
    assert moved
    for layout in set(moved):
        said = re.search(rf"^{layout} = .*register = \[\[0, 0, 1\].*lane = (.*), warp", text, re.M)
        assert said, layout
        assert said[1] == "[[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]"

"""`batch_invariant` of every backend that has it, for PAGEDATTN_EXAMPLES examples: 20 000."""

import os

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_batch_invariant import check_other_batches, every_backend

PARTS = 10
EXAMPLES = int(os.environ.get("PAGEDATTN_EXAMPLES", "20000")) // PARTS


@every_backend
@pytest.mark.parametrize("part", range(PARTS))
def test_other_batches_give_the_same_bits(framework, name, part):
    @hypothesis.seed(part)
    @hypothesis.settings(hypothesis.settings(), max_examples=EXAMPLES, derandomize=False)
    @given(data=st.data())
    def check(data):
        check_other_batches(framework, name, data)

    print(f"{EXAMPLES} examples of seed {part}")
    check()

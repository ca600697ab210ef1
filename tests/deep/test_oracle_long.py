"""Every backend against the oracle, for as many examples as PAGEDATTN_EXAMPLES says: 20 000."""

import os

import hypothesis
import pytest
from cases import problems_for, run
from hypothesis import given

from pagedattn.testing import assert_attention_close
from pagedattn.testing.strategies import any_phase

PARTS, MODES = 10, 2
EXAMPLES = int(os.environ.get("PAGEDATTN_EXAMPLES", "20000")) // (PARTS * MODES)


@pytest.mark.parametrize("part", range(PARTS))
def test_matches_the_oracle(backend, mode, part):
    @hypothesis.seed(part)
    @hypothesis.settings(hypothesis.settings(), max_examples=EXAMPLES, derandomize=False)
    @given(problem=problems_for(backend, any_phase))
    def check(problem):
        assert_attention_close(*run(problem, backend, mode), problem, name=backend)

    print(f"{EXAMPLES} examples of seed {part}")
    check()

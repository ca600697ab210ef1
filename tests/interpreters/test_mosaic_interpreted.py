"""The Mosaic kernels without a GPU: by JAX's GPU interpreter, which detects races.

And some bugs that it has to see: a wrong rule of the interpreter would hide them.
"""

import pytest
from mosaic_bugs import FEW
from mosaic_cases import CASES
from mosaic_process import check_bug, check_case, interpreted

EXAMPLES = 2  # of each case, beside its own lengths: tests/deep has more


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_as_the_oracle_has_it_and_without_races(name):
    check_case(name, EXAMPLES)


@interpreted
@pytest.mark.parametrize("name", FEW)
def test_bugs_are_seen(name, tmp_path):
    check_bug(name, tmp_path)

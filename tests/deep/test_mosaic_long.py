"""The Mosaic kernels by JAX's GPU interpreter: 500 lengths a kernel, or PAGEDATTN_INTERPRETED.

And all bugs that it has to see.
"""

import os
from collections import Counter

import pytest
from mosaic_bugs import BUGS
from mosaic_cases import CASES
from mosaic_process import check_bug, check_case, interpreted

EXAMPLES = int(os.environ.get("PAGEDATTN_INTERPRETED", "500"))
CASES_OF = Counter(case.kernel for case in CASES.values())


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_any_lengths(name):
    examples = -(-EXAMPLES // CASES_OF[CASES[name].kernel])
    print(f"{examples} examples")
    check_case(name, examples, seconds=60 + 60 * examples)


@interpreted
@pytest.mark.parametrize("name", BUGS)
def test_all_bugs_are_seen(name, tmp_path):
    check_bug(name, tmp_path)

"""The fuzzer of test_fuzz, for as many calls as PAGEDATTN_FUZZ says: 50 000 unless told."""

import os

import option_calls
import pytest
from fuzzing import fuzz

CALLS = int(os.environ.get("PAGEDATTN_FUZZ", "50000"))
SHARES = {"CORE": 0.2, "SELECTION": 0.05, "TREES": 0.05, "TORCH": 0.15, "CLASSES": 0.15}
SHARES |= {"OPTIONS": 0.15, "STEPS": 0.1, "CROSSING": 0.05, "LAYERS": 0.1}
PARTS = 10  # so that several processes share them


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("family", SHARES)
def test_no_foreign_exception_at_all(family, part):
    count = int(CALLS * SHARES[family] / PARTS)
    first = 1_000_000 + part * count  # seeds that the short form does not have
    print(f"{count} calls from seed {first} on")
    failures = fuzz(option_calls.FAMILIES[family], range(first, first + count))
    assert not failures, "\n".join(map(str, failures))

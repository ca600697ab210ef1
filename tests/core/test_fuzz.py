"""Hostile values in every argument of every public function: an error of ours, and nothing changed.

The short form; `make test-deep` runs the long one.
"""

import public_calls
import pytest
import torch
from fuzzing import fuzz

from pagedattn import InvalidInputError

COUNTS = {"CORE": 600, "TORCH": 450, "CLASSES": 450}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("family", COUNTS)
def test_hostile_values_end_in_errors_of_ours(family):
    failures = fuzz(getattr(public_calls, family), range(COUNTS[family]))
    assert not failures, "\n".join(map(str, failures))


def test_the_fuzzer_finds_foreign_exceptions_and_changes():
    """It has to fail for functions that check nothing, and that write before they check."""

    def writes(plane, name):
        plane += 1
        if name is not None:
            raise InvalidInputError("too late")

    calls = {
        "length": lambda: (lambda obj: len(obj), {"obj": [1]}),
        "writes": lambda: (writes, {"plane": torch.zeros(2), "name": None}),
    }
    errors = " ".join(failure.error for failure in fuzz(calls, range(60)))
    assert "TypeError" in errors
    assert "it failed, but changed ['plane']" in errors

"""What `make test-deep` changes to see its tests fail still stands where it looks for it."""

from pathlib import Path

import pytest
from mutants import MUTANTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_has_one_place_and_tests_to_notice_it(name):
    mutant = MUTANTS[name]
    assert len(mutant.files(ROOT)) == 1
    assert (ROOT / mutant.tests.split()[0]).is_file()

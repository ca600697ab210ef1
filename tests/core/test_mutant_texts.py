"""What tests change to see others fail still stands where they look for it."""

from pathlib import Path

import pytest
from mosaic_bugs import BUGS, FEW, UNSEEN
from mutants import MUTANTS, files_with

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_has_one_place_and_tests_to_notice_it(name):
    mutant = MUTANTS[name]
    assert len(files_with(mutant.text, ROOT)) == 1
    assert (ROOT / mutant.tests.split()[0]).is_file()


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_of_a_kernel_has_one_place_and_a_case_to_show_it(name):
    from mosaic_cases import CASES

    bug = BUGS[name]
    (file,) = files_with(bug.text, ROOT)
    assert "mosaic" in file.parts
    assert bug.case in CASES


def test_bugs_of_every_run_are_among_all():
    assert set(FEW) <= set(BUGS)


@pytest.mark.parametrize("text", UNSEEN)
def test_a_fence_that_no_test_without_a_gpu_sees_is_there(text):
    assert len(files_with(text, ROOT)) == 1

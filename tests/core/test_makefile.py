"""No test is left out by what the Makefile runs apart."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_files_with_tests_marked_optimised_are_named():
    """`make test` runs tests of that mark in these files alone."""
    named = re.findall(r"^OPTIMISED := (.*)$", _unfolded("Makefile"), re.MULTILINE)
    marked = [
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if "mark.optimised" in file.read_text() and file != Path(__file__)
    ]
    assert sorted(named[0].split()) == sorted(marked)


def _unfolded(name):
    return (ROOT / name).read_text().replace("\\\n", "")

"""The programs of examples/: each is short, and listed with what it shows."""

import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(EXAMPLES.glob("*.py"))
TABLE = re.findall(r"^\| .*", (EXAMPLES / "README.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_is_one_idea_under_80_lines(program):
    text = program.read_text()
    assert len(text.splitlines()) < 80
    assert f"python examples/{program.name}" in text.split('"""')[1]  # how to run it, at the top


def test_all_programs_are_listed_and_no_others():
    named = re.findall(r"\]\((\w+\.py)\)", "\n".join(TABLE))
    assert sorted(named) == [program.name for program in PROGRAMS]

"""What JAX's GPU interpreter lacks, by the programs of docs/contributing/jax-interpreter.

A program fails until JAX has what it lacks; then our rule for it may go.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from mosaic_process import ROOT, interpreted

FOLDER = ROOT / "docs/contributing/jax-interpreter"
PROGRAMS = sorted(FOLDER.glob("*.py"))
HANGS = "nothing: it hangs"
SECONDS = 40
MOST_LINES = 40


def told(path: Path) -> str:
    """What the program ends with, by its last line."""
    (words,) = re.findall(r"^# It ends with: (.*)$", path.read_text(), re.MULTILINE)
    return words


@interpreted
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_jax_lacks_it_still(path):
    command = [sys.executable, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        assert told(path) == HANGS
        return
    assert done.returncode == 1, "JAX has it now: is our rule needed?"
    assert told(path) in done.stderr


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_is_short_and_on_the_page(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES
    assert f"(jax-interpreter/{path.name})" in FOLDER.with_suffix(".md").read_text()
    assert told(path)

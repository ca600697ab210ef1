"""Every mutant of the library is noticed by the tests that are named for it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import LIBRARY, MUTANTS, files_with

ROOT = Path(__file__).parents[2]
FAILED = 1  # pytest's exit code; others mean that the tests could not run


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The library and its tests, to be changed."""
    target = tmp_path_factory.mktemp("mutants")
    for name in (*LIBRARY, "tests", "examples"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", target)
    return target


def exit_code(root, tests):
    files, *selection = tests.split(" -k ")
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", files]
    command += ["-k", selection[0]] if selection else []
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "mutants"}
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=900
    )
    print(done.stdout[-3000:])
    return done.returncode


@pytest.mark.parametrize("tests", sorted({mutant.tests for mutant in MUTANTS.values()}))
def test_the_tests_pass_without_a_mutant(copy, tests):
    assert exit_code(copy, tests) == 0


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(copy, name):
    mutant = MUTANTS[name]
    (file,) = files_with(mutant.text, copy)
    whole = file.read_text()
    file.write_text(whole.replace(mutant.text, mutant.mistake))
    try:
        assert exit_code(copy, mutant.tests) == FAILED
    finally:
        file.write_text(whole)

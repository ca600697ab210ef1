"""No test is left out by what the Makefile runs apart, nor by what runs the Makefile."""

import os
import re
import subprocess
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("file", [".ci/run", ".github/workflows/ci.yml"])
def test_what_runs_the_makefile_names_its_targets(file):
    phony = set(re.findall(r"^\.PHONY: (.*)$", _unfolded("Makefile"), re.MULTILINE)[0].split())
    asked = re.findall(r"(?:make |target: )([\w-]+)", _unfolded(file))
    assert {"lint", "test", "test-hopper", "test-targets", "test-newest"} <= set(asked) <= phony


NO_PYTHON = "#!/bin/sh\necho 'pyenv: not selected' >&2\nexit 127\n"


@pytest.mark.parametrize(
    ("on_path", "of_pyenv", "taken"),
    [
        ({"3.13": True, "3.14": True}, {}, "python3.14"),
        ({"3.13": True, "3.14": False}, {"3.13.0": True}, "python3.13"),
        ({"3.13": False}, {"3.12.1": True, "3.13.0": True}, "3.13.0/bin/python"),  # a shim
        ({"3.13": True}, {"3.14.2": True}, "3.14.2/bin/python"),
        ({"3.13": False}, {"3.12.1": True, "3.13.0": False}, "python3"),
    ],
)
def test_the_newest_python_is_one_that_runs(tmp_path, on_path, of_pyenv, taken):
    """And where none does, that is said."""
    for version, runs in on_path.items():
        _python(tmp_path / f"bin/python{version}", version, runs)
    for version, runs in of_pyenv.items():
        _python(tmp_path / f"pyenv/versions/{version}/bin/python", version, runs)
    path = f"{tmp_path / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin"
    environment = {"PATH": path, "PYENV_ROOT": str(tmp_path / "pyenv"), "HOME": str(tmp_path)}
    command = ["bash", str(ROOT / ".ci/newest-python")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith(taken)
    assert ("no Python 3.13 or 3.14 runs here" in done.stderr) == (taken == "python3")


def _python(file: Path, version: str, runs: bool):
    """One that runs a program if that names its minor version."""
    file.parent.mkdir(parents=True, exist_ok=True)
    minor = version.split(".")[1]
    file.write_text(f'#!/bin/sh\ncase "$2" in *"== {minor}"*) ;; *) exit 1 ;; esac\n')
    if not runs:
        file.write_text(NO_PYTHON)
    file.chmod(0o755)

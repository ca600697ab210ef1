"""Forked programs end as they would alone: a test of theirs can fail."""

import pytest
from forked import run_forked


def test_what_a_program_prints_is_given_and_takes_arguments():
    done = run_forked("import sys; print(sys.argv[1:]); print('x', file=sys.stderr)", argv=("a",))
    assert (done.returncode, done.stdout, done.stderr) == (0, "['a']\n", "x\n")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(3)", 3),
        ("assert False", 1),
        ("import os; os.abort()", -6),
        ("import threading; threading.Event().wait()", -14),  # the alarm
    ],
)
def test_how_a_program_ends_is_told(code, status):
    assert run_forked(code, seconds=1).returncode == status


def test_a_program_changes_nothing_for_the_next():
    run_forked("import json; json.dumps = None")
    assert run_forked("import json; json.dumps(1)").returncode == 0


def test_what_is_registered_for_the_end_runs():
    done = run_forked("import atexit; atexit.register(print, 'end')")
    assert done.stdout == "end\n"

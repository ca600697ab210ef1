"""Processes that begin where an interpreter has imported: to import takes longer than most of them.

A process that does nothing else imports, and is forked for each program. What a program is given,
what it prints and how it ends are those of `python -c`, but for what is imported already.
"""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# Forked, it goes on to be the program: its own names lie about there, and its end is Python's.
PARENT = """
import json, os, signal, sys
for name in sys.argv[1:]:
    __import__(name)
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
signal.alarm(request["seconds"])
for descriptor, path in enumerate(request["paths"]):
    os.dup2(os.open(path, os.O_RDWR), descriptor)
sys.argv = request["argv"]
exec(compile(request["code"], "<string>", "exec"))
"""


@functools.cache
def having_imported(*modules: str) -> subprocess.Popen:
    """The process that is forked."""
    command = [sys.executable, "-W", "ignore:os.fork:RuntimeWarning", "-c", PARENT, *modules]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    parent = subprocess.Popen(command, **pipes)
    atexit.register(parent.communicate)
    return parent


def run_forked(
    code: str, *modules: str, argv: tuple[str, ...] = (), seconds: int = 600
) -> subprocess.CompletedProcess:
    """Runs a program in a fork of a process that has imported these modules."""
    parent = having_imported(*modules)
    assert parent.stdin
    assert parent.stdout
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        for file in (out, err):
            file.touch()
        paths = [os.devnull, str(out), str(err)]
        request = {"code": code, "argv": ["", *argv], "paths": paths, "seconds": seconds}
        print(json.dumps(request), file=parent.stdin, flush=True)
        return subprocess.CompletedProcess(
            code, int(parent.stdout.readline()), out.read_text(), err.read_text()
        )

"""Keeps the process from aborting if it ends while XLA calls Python.

When the interpreter ends, it kills every thread that asks to run Python again; and killing a thread
that has XLA's frames on its stack aborts the process. So, at exit, the interpreter waits until the
calls under way are over, and daemon threads of Python that would begin another call sleep instead.
XLA's own threads go on, since someone may be waiting for their results: at the latest an atexit
function in the main thread.
"""

import atexit
import contextlib
import threading
import time

import jax

_calls: list[None] = []  # one for each call under way
_ending = False
LAST_STEPS = 0.05  # seconds: more than a thread needs from one call to the next


def begin_call() -> None:
    """Counts a call; at the end of the process it never returns in a daemon thread of Python."""
    _calls.append(None)
    if _ending and threading.current_thread().daemon and not _is_xlas():
        _calls.pop()
        threading.Event().wait()


def end_call() -> None:
    """Counts a call as over; it may be any thread's, since only their number matters."""
    _calls.pop()


def _is_xlas():
    """Whether XLA started this thread: Python knows threads that it did not start as dummies."""
    return isinstance(threading.current_thread(), threading._DummyThread)


@atexit.register
def _end() -> None:
    global _ending
    for array in jax.live_arrays():
        with contextlib.suppress(RuntimeError):  # deleted meanwhile, or its program failed
            array.block_until_ready()
    _ending = True
    while _calls:
        time.sleep(1e-3)
    time.sleep(LAST_STEPS)

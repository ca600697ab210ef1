"""The end of the process while XLA calls Python.

An interpreter that ends kills every thread that comes back to it, and a killed thread with XLA's
frames on its stack aborts the process. So calls under way end first, and threads of Python that
would begin another wait for the end of the process. XLA's own threads go on: somebody may wait for
them, an atexit function of the main thread at last.
"""

import atexit
import contextlib
import threading
import time

import jax

_calls: list[None] = []  # one for each call under way
_ending = False
LAST_STEPS = 0.05  # seconds in which a thread gets from one call to the next


def begin_call() -> None:
    _calls.append(None)
    if _ending and threading.current_thread().daemon and not _is_xlas():
        _calls.pop()
        threading.Event().wait()


def end_call() -> None:
    _calls.pop()


def _is_xlas():
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

"""How long a call takes when calls are enqueued faster than the device computes them."""

import math
import statistics
import time
from collections.abc import Callable

import jax

CALLS = 300  # enqueued at a time: many, since the host may see the end a millisecond late
ENOUGH = 0.3  # seconds, in which the clock has come down to what the power limit allows


def seconds_a_call(
    call: Callable, wait: Callable = jax.block_until_ready, calls: int = CALLS
) -> float:
    """Seconds a call, the median of some runs of up to so many calls; `wait` waits for a result."""
    seconds_of_run(call, wait, 1)
    once = seconds_of_run(call, wait, 1)
    calls = min(calls, math.ceil(ENOUGH / once))
    return statistics.median(seconds_of_run(call, wait, calls) for _ in range(3)) / calls


def seconds_of_run(call: Callable, wait: Callable, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        # Each result is dropped at once, as in a serving loop, so that buffers are used again:
        # XLA captures a CUDA graph anew for buffers that its last 16 captures did not use.
        result = call()
    wait(result)
    return time.perf_counter() - start

"""How long a call takes when calls are enqueued faster than the device computes them."""

import statistics
import time
from collections.abc import Callable

import jax

CALLS = 40  # enqueued at a time: many, since the host may see the end a millisecond late


def seconds_a_call(
    call: Callable, wait: Callable = jax.block_until_ready, calls: int = CALLS
) -> float:
    """Seconds a call, the median of some runs of so many calls; `wait` waits for a result."""
    wait(call())
    wait(call())
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(calls):
            # Each result is dropped at once, as in a serving loop, so that buffers are used again:
            # XLA captures a CUDA graph anew for buffers that its last 16 captures did not use.
            result = call()
        wait(result)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)

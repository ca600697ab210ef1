"""How long a call takes, for tests that compare two."""

import time

import jax


def best_time(call, *args, repeats=200):
    """Seconds of the quickest call: one of many goes undisturbed on a busy machine too."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call(*args))
        times.append(time.perf_counter() - start)
    return min(times)

"""How long a call takes where calls are enqueued faster than the device computes them."""

import math
import statistics
import time
from collections.abc import Callable

import jax

CALLS = 300  # enqueued at a time: many, since the host may see the end a millisecond late
ENOUGH = 0.3  # seconds, in which the clock has come down to what the power limit allows
LAYERS = 8  # calls of attention in one program of `layers_of`


def seconds_a_call(
    call: Callable, wait: Callable = jax.block_until_ready, calls: int = CALLS
) -> float:
    """Seconds a call, the median of some runs of up to so many calls; `wait` waits for a result.

    Nobody is timed in a burst on an idle device: long queries draw so much power that a GPU lowers
    its clock after some milliseconds, by which a burst on an H200 is 10 % faster than the load.
    """
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


def time_enqueued(call: Callable) -> float:
    """Microseconds of torch's call, on a GPU that has been busy with such calls for a while."""
    import torch

    return 1e6 * seconds_a_call(call, lambda _: torch.cuda.synchronize())


def captured(call: Callable, times: int):
    """A CUDA graph of `call(0) ... call(times - 1)`."""
    import torch

    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(times):
            call(index)
    return graph


def layers_of(call: Callable) -> Callable:
    """Calls of which each waits for the one before, as the layers of a model do."""

    @jax.jit
    def program(query, cache, batch):
        for _ in range(LAYERS):
            query, cache = after(query, cache)
            query = call(query, cache, batch)
        return query

    return program


def after(query: jax.Array, operands):
    """The same arrays, where XLA cannot compute anything of keys and values before the query.

    Else it would drop calls, or gather pages once for two of them, while every layer of a model has
    a cache of its own. Its layers share the tables and lengths, and what follows from these alone
    is computed once, as what peers plan for a step is.
    """
    leaves, tree = jax.tree.flatten(operands)
    planes = [leaf for leaf in leaves if leaf.ndim > 2]
    query, planes = jax.lax.optimization_barrier((query, planes))
    behind = iter(planes)
    return query, tree.unflatten([next(behind) if leaf.ndim > 2 else leaf for leaf in leaves])

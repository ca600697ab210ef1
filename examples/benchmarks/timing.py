"""How long a call takes where calls are enqueued faster than the device computes them."""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

CALLS = 300  # enqueued at a time: many, since the host may see the end a millisecond late
ENOUGH = 0.3  # seconds, in which the clock has come down to what the power limit allows
LAYERS = 8  # calls of attention in one program, at least
# Repeated calls must read at least so much before they come back to a page, or the cache has it.
L2_BYTES = 200 << 20


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
        result = call()  # drops the one before, as a serving loop does
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


def in_place(function: Callable, *operands) -> Callable[[], Any]:
    """Calls of a function in `jax.jit` that put each result where the last one was.

    So does a loop that donates its state. Where results lie elsewhere each time, XLA captures a
    CUDA graph anew for all buffers that its last 16 captures did not use, or uses none: the times
    of short layers then double from one run to the next.
    """
    shape = jax.eval_shape(function, *operands)
    program = jax.jit(lambda _, *given: function(*given), donate_argnums=0, keep_unused=True)
    bound = [x.sharding for x in jax.tree.leaves(operands) if x.committed]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
    # Committed as results are, or the second call would be compiled anew.
    last = [jax.device_put(zeros, bound[0] if bound else None)]

    def call():
        last[0] = program(last[0], *operands)
        return last[0]

    return call


def layers_of(
    call: Callable, query, operands: list, layers: int = LAYERS
) -> Callable[[], jax.Array]:
    """Runs of so many layers in one program.

    Each waits for the one before, as the layers of a model do, and takes the next of the operands.
    """

    def step(query, operands):
        for layer in range(layers):
            query = call(*after(query, operands[layer % len(operands)]))
        return query

    return in_place(step, query, operands)


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

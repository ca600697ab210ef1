"""How gpu.py measures: microseconds on the device, and the machine's ceilings."""

import statistics
import time
from collections.abc import Callable

import jax
import torch

CALLS = 40  # enqueued at a time: many, since the host may see the end a millisecond late


def captured(call: Callable, times: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `call(0) ... call(times - 1)`."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(times):
            call(index)
    return graph


def time_alone(call: Callable) -> float:
    """Microseconds of a call on a device that is idle before; the median of some."""
    call()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def time_enqueued(call: Callable, wait: Callable = jax.block_until_ready) -> float:
    """Microseconds a call when calls are enqueued faster than the device computes them."""
    wait(call())
    wait(call())
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(CALLS):
            # Each result is dropped at once, as in a serving loop, so that buffers are used again:
            # XLA captures a CUDA graph anew for buffers that its last 16 captures did not use.
            result = call()
        wait(result)
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """TB/s of a device-to-device copy, read and written."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * len(source) / time_alone(lambda: target.copy_(source)) / 1e6


def matmul_rate() -> float:
    """TFLOP/s of a bfloat16 product of random 8192 x 8192 matrices."""
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / time_alone(lambda: a @ b) / 1e6

"""How gpu.py measures by torch: microseconds on the device, and the machine's ceilings."""

import statistics
from collections.abc import Callable

import torch


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


def copy_bandwidth() -> float:
    """TB/s of a device-to-device copy, read and written."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * len(source) / time_alone(lambda: target.copy_(source)) / 1e6


def matmul_rate() -> float:
    """TFLOP/s of a bfloat16 product of random 8192 x 8192 matrices."""
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / time_alone(lambda: a @ b) / 1e6

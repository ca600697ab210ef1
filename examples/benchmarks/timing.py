"""How gpu.py measures by torch: microseconds on the device, and the machine's ceilings."""

from collections.abc import Callable

import torch

from benchmarks.enqueued import seconds_a_call


def captured(call: Callable, times: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `call(0) ... call(times - 1)`."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(times):
            call(index)
    return graph


def time_enqueued(call: Callable) -> float:
    """Microseconds of a call on a device that has been busy with such calls for a while.

    Nobody is timed in a burst on an idle device: long queries draw so much power that a GPU lowers
    its clock after some milliseconds, by which a burst on an H200 is 10 % faster than the load.
    """
    return 1e6 * seconds_a_call(call, lambda _: torch.cuda.synchronize())


def copy_bandwidth() -> float:
    """TB/s of a device-to-device copy, read and written."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * len(source) / time_enqueued(lambda: target.copy_(source)) / 1e6


def matmul_rate() -> float:
    """TFLOP/s of a bfloat16 product of random 8192 x 8192 matrices."""
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / time_enqueued(lambda: a @ b) / 1e6

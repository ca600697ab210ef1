"""Contenders of one case that take turns on a device: a figure is the median of turns."""

import time
from collections.abc import Callable, Iterable
from statistics import median

import jax
import torch

from benchmarks.report import reason_of
from benchmarks.timing import captured

TURNS, SECONDS = 25, 0.015  # of each: turns, many where machines are shared; seconds of a turn


def of_graphs(call: Callable, calls: int) -> Callable[[], float]:
    """`seconds()` of a call, from a turn of CUDA graphs of `call(0) ... call(calls - 1)`."""
    graph = captured(call, calls)
    replays = max(1, round(SECONDS / (graph_seconds(graph, 3) / 3)))
    return lambda: graph_seconds(graph, replays) / replays / calls


def graph_seconds(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def of_arrays(run: Callable, *arrays) -> Callable[[], float]:
    """`seconds()` of a call of JAX's arrays."""

    def seconds() -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(*arrays))
        return time.perf_counter() - start

    return seconds


def in_turns(prepare: Callable, names: Iterable[str]) -> dict[str, float | str]:
    """Microseconds of the contenders that `prepare(name)` gives, or why there are none."""
    found: dict[str, float | str] = {}
    calls, times = {}, {}
    for name in names:
        try:
            calls[name], times[name] = prepare(name), []
        except Exception as error:
            found[name] = reason_of(error)
    for _ in range(TURNS):
        for name, call in calls.items():
            times[name].append(call())
    return found | {name: round(1e6 * median(taken), 2) for name, taken in times.items()}

"""Times paged attention on a CPU, side by side with its peers.

    PYTHONPATH=examples python -m benchmarks.cpu [-o docs/results] [-k "decode 8x4096"] [-t 1]

A contender is a function that takes a `CpuCase` and returns a function that computes it. If it
raises, its cell stays empty and the error is printed. Contenders take turns in a random order, one
call each; a figure is the median of a contender's calls. In decode a sum of as many bytes as keys
and values have takes its turn with them, in the rest as many multiplications of float32: what the
machine reads, and computes without AMX, at best just then. The report is written after every case;
figures on fewer threads are added to that of a run on all. To add a contender, see peers/.
"""

import argparse
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import jax
import pagedattn_interop
import torch

import pagedattn_torch
from benchmarks import machine
from benchmarks.case import HEADS_SAID, CpuCase
from benchmarks.chosen import chosen
from benchmarks.peers import installed, ipex
from benchmarks.peers.cpu import PEERS
from benchmarks.peers.multiplications import multiplications
from benchmarks.plot import cpu_figure, draw
from benchmarks.report import MULTIPLICATIONS, SUM, Report, reason_of
from pagedattn import KVCache, paged_attention

SHAPES = {
    "decode 8x4096": ([1] * 8, [4096] * 8),
    "decode 1x32768": ([1], [32768]),
    "decode 64x512": ([1] * 64, [512] * 64),
    "decode skewed": ([1] * 8, [256] * 7 + [16384]),
    "prefill 1x2048": ([2048], [2048]),
    "prefill 4x512": ([512] * 4, [512] * 4),
    "chunk 512 on 512": ([512], [1024]),
    "mixed": ([512] + [1] * 7, [1024] * 8),  # that chunk and seven decodes
}
FEW = "decode 8x4096", "decode 64x512", "prefill 1x2048", "mixed"
CASES = [
    CpuCase(shape, *SHAPES[shape], block_size, dtype_name)
    for dtype_name, block_size, shapes in (
        ("bfloat16", 16, SHAPES),
        ("float32", 16, FEW),
        ("float16", 16, FEW),
        ("bfloat16", 128, FEW),
    )
    for shape in shapes
]
# The ratios that the library aims at: speed of the first contender over that of the second.
AIMS = {
    "numba / vLLM": ("numba, jax.jit", "vLLM"),
    "numba / IPEX": ("numba, jax.jit", "IPEX"),
    "numba / sum": ("numba, jax.jit", SUM),
    "numba / multiplications": ("numba, jax.jit", MULTIPLICATIONS),
    "numba / sdpa": ("numba, jax.jit", "sdpa, jax.jit"),
    "numba / dense": ("numba, jax.jit", "torch SDPA, dense"),
    "sdpa / dense": ("sdpa, jax.jit", "torch SDPA, dense"),
    "xla / gather": ("xla, jax.jit", "JAX gather + einsum"),
    "xla / sdpa": ("xla, jax.jit", "sdpa, jax.jit"),
}
LEAST_ROUNDS, MOST_ROUNDS = 7, 25  # calls of each contender
SECONDS = 0.8  # between these bounds, a contender is called until its calls took so long
PAUSE = 0.01  # seconds in which the last contender's threads stop waiting for more work


def our_jax(backend: str | None) -> Callable:
    def prepare(case: CpuCase) -> Callable:
        query, cache = pagedattn_interop.to_jax((case.query, KVCache(*case.planes)))
        attend = jax.jit(lambda *arrays: paged_attention(*arrays, backend=backend))
        batch = case.batch
        return lambda: attend(query, cache, batch)

    return prepare


def our_torch(backend: str) -> Callable:
    def prepare(case: CpuCase) -> Callable:
        cache, batch = KVCache(*case.planes), pagedattn_interop.to_torch(case.batch)
        return lambda: pagedattn_torch.paged_attention(case.query, cache, batch, backend=backend)

    return prepare


OURS = {
    "numba, jax.jit": our_jax("numba"),
    "sdpa, jax.jit": our_jax("sdpa"),
    "xla, jax.jit": our_jax("xla"),
    "backend=None, jax.jit": our_jax(None),
    "numba, torch": our_torch("numba"),
    "sdpa, torch": our_torch("sdpa"),
}


def timed(prepare: Callable) -> Callable:
    """A contender, checked for a right result, whose calls return the seconds that they took."""

    def contender(case: CpuCase) -> Callable:
        call = prepare(case)
        out = call()
        case.require(out if isinstance(out, torch.Tensor) else pagedattn_interop.to_torch(out))

        return clocked(call)

    return contender


def clocked(call: Callable) -> Callable:
    def seconds() -> float:
        start = time.perf_counter()
        jax.block_until_ready(call())
        return time.perf_counter() - start

    return seconds


def measure(report: Report, case: CpuCase, contenders: dict[str, Callable]) -> None:
    """Times all contenders on a case, and adds it to the report."""
    row, calls = report.begin(case, dtype=case.dtype_name), {}
    for name, contender in contenders.items():
        try:
            calls[name] = contender(case)
        except Exception as error:
            report.add(row, name, reason_of(error))
    if case.decode:
        calls[SUM] = clocked(torch.ones(case.kv_bytes // 4).sum)
    else:
        calls[MULTIPLICATIONS] = clocked(multiplications(case, torch.get_num_threads()))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(MOST_ROUNDS):
        for name in random.sample(list(times), len(times)):
            taken = times[name]
            if len(taken) < LEAST_ROUNDS or sum(taken) < SECONDS:
                time.sleep(PAUSE)
                taken.append(calls[name]())
    for name, taken in times.items():
        report.add(row, name, median(taken) * 1e6)
    calls.clear()
    case.free()


def use(threads: int) -> None:
    """Keeps this process to so many CPUs, and those that it starts; before JAX is first used."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    torch.set_num_threads(threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--out", type=Path, help="folder for the report and its picture")
    parser.add_argument("-k", "--only", default="", help="cases whose name contains this")
    parser.add_argument("-t", "--threads", type=int, help="threads, and CPUs; all by default")
    arguments = parser.parse_args()
    names = chosen(parser, arguments.only, [case.name for case in CASES])
    if threads := arguments.threads:
        use(threads)
    path = arguments.out and arguments.out / "cpu.json"
    key = ("on_fewer_threads", str(threads)) if threads else None
    with ipex.Ipex() as process:
        about = machine.cpu(HEADS_SAID)
        about["versions"] |= process.versions or {}
        report = Report(path, about, list(OURS), key=key)
        contenders = {
            name: timed(one) for name, one in (OURS | installed(PEERS, report.miss)).items()
        }
        if process.versions:
            contenders["IPEX"] = process.contender
        else:
            report.miss("IPEX", ipex.CURE)
        for case in CASES:
            if case.name in names:
                measure(report, case, contenders)
    report.print_tables(AIMS)
    if path and not threads:
        print(draw(path, cpu_figure))


if __name__ == "__main__":
    main()

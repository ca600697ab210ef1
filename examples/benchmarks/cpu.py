"""Times paged attention on a CPU, side by side with its peers.

    PYTHONPATH=examples python -m benchmarks.cpu [-o docs/results] [-k "decode 8x4096"] [-t 1]

A contender is a function that takes a `Case` and returns a function that computes it. If it raises,
its cell stays empty and the error is printed. Contenders take turns, one call each; a figure is the
median of a contender's calls. In decode a sum of as many bytes as keys and values have takes its
turn with them: what the machine reads at best just then. The report is written after every case;
figures on fewer threads are added to that of a run on all. To add a contender, see cpu_peers.py.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import jax
import pagedattn_interop
import torch

import pagedattn_torch
from benchmarks.cpu_case import CASES, Case
from benchmarks.cpu_chart import draw
from benchmarks.cpu_ipex import Ipex
from benchmarks.cpu_peers import PEERS
from benchmarks.cpu_report import Report
from benchmarks.work import SUM
from pagedattn import KVCache, make_batch, paged_attention

LEAST_ROUNDS, MOST_ROUNDS = 3, 25  # calls of each contender
SECONDS = 0.8  # between these bounds, a contender is called until its calls took so long
PAUSE = 0.01  # seconds in which the last contender's threads stop waiting for more work


def our_jax(backend: str | None) -> Callable:
    def prepare(case: Case) -> Callable:
        query, cache = pagedattn_interop.to_jax((case.query, KVCache(*case.planes)))
        attend = jax.jit(lambda *arrays: paged_attention(*arrays, backend=backend))
        batch = _batch(case)
        return lambda: attend(query, cache, batch)

    return prepare


def our_torch(backend: str) -> Callable:
    def prepare(case: Case) -> Callable:
        cache, batch = KVCache(*case.planes), pagedattn_interop.to_torch(_batch(case))
        return lambda: pagedattn_torch.paged_attention(case.query, cache, batch, backend=backend)

    return prepare


def _batch(case):
    contexts = [n - q for q, n in zip(case.query_lens, case.seq_lens, strict=True)]
    return make_batch(case.query_lens, contexts, case.tables.numpy(), block_size=case.block_size)


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

    def contender(case: Case) -> Callable:
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


def measure(report: Report, case: Case, contenders: dict[str, Callable]) -> None:
    """Times all contenders on a case, and adds it to the report."""
    calls, refused = {}, {}
    for name, contender in contenders.items():
        try:
            calls[name] = contender(case)
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            refused[name] = f"{type(error).__name__}: {first[:160]}"
    if case.decode:
        calls[SUM] = clocked(torch.ones(case.kv_bytes // 4).sum)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(MOST_ROUNDS):
        for name, taken in times.items():
            if len(taken) < LEAST_ROUNDS or sum(taken) < SECONDS:
                time.sleep(PAUSE)
                taken.append(calls[name]())
    report.add(case, {name: median(taken) * 1e6 for name, taken in times.items()}, refused)
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
    if arguments.threads:
        use(arguments.threads)
    with Ipex() as ipex:
        report = Report(arguments.out, list(OURS), ipex.versions, arguments.threads)
        contenders = {name: timed(one) for name, one in (OURS | PEERS).items()}
        for case in CASES:
            if arguments.only in case.name:
                measure(report, case, contenders | {"IPEX": ipex.contender})
    report.print_tables()
    if report.path and not arguments.threads:
        print(draw(report.path))


if __name__ == "__main__":
    main()

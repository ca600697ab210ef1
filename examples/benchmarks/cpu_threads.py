"""Times the compiled CPU kernel on 1, 2, 4, ... threads, beside torch at work of the same size.

    PYTHONPATH=examples python -m benchmarks.cpu_threads [-o docs/results]

From JAX (in jit), from torch (a prepared step), and torch's sum of as many bytes as the keys and
values have, for prompts its product of as many operations, each on as many threads. All of a case
take turns, in a new random order each round: as many calls in a row as a decode step has layers,
for prompts fewer. A figure is the median of the turns.
"""

import argparse
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
import torch
from rich.console import Console
from rich.table import Table

import pagedattn_torch
from benchmarks import machine
from benchmarks.case import HEADS_SAID, CpuCase
from benchmarks.chosen import chosen
from benchmarks.report import SUM_OR_PRODUCT
from pagedattn import KVCache, paged_attention

LAYERS, LAYERS_OF_PROMPTS = 32, 4
SIDE = 2048  # of the square matrix of a product
ROUNDS = 15
SECONDS = 2.0  # a contender has turns until they took so long, three at least
CASES = [
    CpuCase("64x4096", [1] * 64, [4096] * 64),
    CpuCase("64x1024", [1] * 64, [1024] * 64),
    CpuCase("8x4096", [1] * 8, [4096] * 8),
    CpuCase("skewed", [1] * 8, [256] * 7 + [16384]),
    CpuCase("8x512", [1] * 8, [512] * 8),
    CpuCase("4x64", [1] * 4, [64] * 4),
    CpuCase("prompt 1x2048", [2048], [2048]),
    CpuCase("prompts 4x512", [512] * 4, [512] * 4),
]


def from_jax(case: CpuCase, threads: int) -> Callable:
    planes = (case.query, *case.planes)
    query, key, value = (
        jnp.asarray(plane.view(torch.int16).numpy().view(jnp.bfloat16)) for plane in planes
    )
    cache, batch = KVCache(key, value), case.batch

    @jax.jit
    def attend(query, cache, batch):
        with on_threads(threads):
            return paged_attention(query, cache, batch, backend="numba")

    return lambda: attend(query, cache, batch).block_until_ready()


@contextmanager
def on_threads(threads: int) -> Iterator[None]:
    """The kernel runs on so many threads in what is traced here."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        os.environ |= {"OMP_NUM_THREADS": before} if before else {}


def from_torch(case: CpuCase, threads: int) -> Callable:
    cache = KVCache(*case.planes)
    step = pagedattn_torch.prepare(case.query, cache, case.batch, backend="numba")
    return lambda: step.attend(case.query, cache)


def at_best(case: CpuCase, threads: int) -> Callable:
    if case.decode:
        return torch.ones(case.kv_bytes // 4).sum
    a = torch.randn(int(case.flops) // (2 * SIDE**2), SIDE).to(case.dtype)
    b = torch.randn(SIDE, SIDE).to(case.dtype)
    return lambda: torch.matmul(a, b)


CONTENDERS = {"numba, jax.jit": from_jax, "numba, torch": from_torch, SUM_OR_PRODUCT: at_best}


def counts() -> list[int]:
    """1, 2, 4, ... threads, and as many as there are CPUs."""
    cpus = len(os.sched_getaffinity(0))
    return sorted({1 << i for i in range(cpus.bit_length()) if 1 << i < cpus} | {cpus})


def measure(case: CpuCase) -> dict[str, dict[int, float]]:
    """Microseconds of each contender by its number of threads."""
    calls, layers = {}, LAYERS if case.decode else LAYERS_OF_PROMPTS
    for threads in counts():
        torch.set_num_threads(threads)
        for name, prepare in CONTENDERS.items():
            calls[name, threads] = prepare(case, threads)
            calls[name, threads]()
    times: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    for _ in range(ROUNDS):
        for key in random.sample(list(calls), len(calls)):
            if len(times[key]) < 3 or sum(times[key]) < SECONDS:
                torch.set_num_threads(key[1])
                times[key].append(seconds_a_call(calls[key], layers))
    found = {key: median(taken) * 1e6 for key, taken in times.items()}
    return {name: {n: found[name, n] for n in counts()} for name in CONTENDERS}


def seconds_a_call(call: Callable, layers: int) -> float:
    start = time.perf_counter()
    for _ in range(layers):
        call()
    return (time.perf_counter() - start) / layers


def table(rows: dict[str, dict]) -> Table:
    """Milliseconds, and each contender's rate as a share of torch's on as many threads."""
    made = Table(box=None, header_style="dim")
    for heading in ("", "threads", *CONTENDERS, "JAX / best", "torch / best"):
        made.add_column(heading, justify="right")
    for name, us in rows.items():
        for threads in us[SUM_OR_PRODUCT]:
            each = [us[contender][threads] for contender in CONTENDERS]
            shares = (each[2] / ours for ours in each[:2])
            cells = (f"{time / 1e3:.3f}" for time in each)
            made.add_row(name, str(threads), *cells, *(f"{share:.2f}" for share in shares))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--out", type=Path, help="folder for the report")
    parser.add_argument("-k", "--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    names = chosen(parser, arguments.only, [case.shape for case in CASES])
    rows = {}
    for case in CASES:
        if case.shape in names:
            rows[case.shape] = measure(case)
            case.free()
    Console(width=120, markup=False).print(table(rows))
    torch.set_num_threads(counts()[-1])
    path = arguments.out and arguments.out / "cpu_threads.json"
    machine.write(path, {"machine": machine.cpu(HEADS_SAID), "us": rows})


if __name__ == "__main__":
    main()

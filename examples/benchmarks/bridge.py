"""Times a torch function that XLA calls.

Against the size of its argument (the time should not depend on it), the number of calls in a
program, and the number of Python threads that run programs.

    PYTHONPATH=examples python -m benchmarks.bridge [-o docs/results]
"""

import argparse
import datetime
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from pagedattn_interop import torch_call
from rich.console import Console
from rich.table import Table

from benchmarks.machine import versions, write
from benchmarks.plot import bridge_figure, draw

OUT = jax.ShapeDtypeStruct((1,), jnp.float32)
SIZES = {"1 KB": 10, "64 KB": 16, "1 MB": 20, "32 MB": 25, "1 GB": 30}
LAYERS = 1, 32, 256
THREADS = 1, 2, 4
ROUNDS = 5


def add_one(array, counter):
    return counter + 1


def by_torch_call(array, counter):
    return torch_call(add_one, OUT)(array, counter)


def by_pure_callback(array, counter):
    def on_host(array, counter):
        return (torch.from_numpy(np.array(counter)) + 1).numpy()

    return jax.pure_callback(on_host, OUT, array, counter)


WAYS = {"torch_call": by_torch_call, "jax.pure_callback": by_pure_callback}


def microseconds(call: Callable, array, calls: int) -> float:
    """Microseconds a call, in a compiled loop in which each call needs the last one's result."""
    loop = jax.jit(
        lambda x: jax.lax.fori_loop(0, calls, lambda _, counter: call(x, counter), jnp.zeros(1))
    )
    if loop(array).item() != calls:
        raise ValueError("calls are missing")
    return _median(lambda: jax.block_until_ready(loop(array))) / calls


def by_size(way: str, exponent: int) -> float:
    copies = way == "jax.pure_callback" and exponent > 20
    return microseconds(WAYS[way], jnp.zeros(1 << exponent >> 2), 1 if copies else 300)


def by_layers(way: str, layers: int) -> float:
    """Microseconds a call, in a program of `layers` calls without a loop."""

    def program(counter):
        for _ in range(layers):
            counter = WAYS[way](counter, counter)
        return counter

    compiled, start = jax.jit(program), jnp.zeros(1)
    if compiled(start).item() != layers:
        raise ValueError("calls are missing")
    return _median(lambda: jax.block_until_ready(compiled(start))) / layers


def by_threads(way: str, threads: int, calls: int = 300) -> float:
    """Microseconds between calls, while several threads each run a program of calls."""
    loops = [
        jax.jit(lambda x: jax.lax.fori_loop(0, calls, lambda _, c: WAYS[way](x, c), x))
        for _ in range(threads)
    ]
    starts = [jnp.full(1, 1000.0 * index) for index in range(threads)]
    ends = [0.0] * threads

    def run(index):
        ends[index] = loops[index](starts[index]).item() - starts[index].item()

    def together():
        workers = [threading.Thread(target=run, args=(index,)) for index in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    together()
    if ends != [calls] * threads:
        raise ValueError(f"threads disturb each other: {ends}")
    return _median(together) / calls / threads


def _median(call: Callable) -> float:
    """Median microseconds of a call, which is compiled already."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6


PARTS: dict[str, tuple[Callable, dict]] = {
    "argument": (by_size, SIZES),
    "calls in a program": (by_layers, {str(layers): layers for layers in LAYERS}),
    "Python threads": (by_threads, {str(threads): threads for threads in THREADS}),
}


def measure() -> dict:
    """Microseconds a call, by part, way and value."""
    return {
        part: {way: {name: one(way, value) for name, value in values.items()} for way in WAYS}
        for part, (one, values) in PARTS.items()
    }


def machine() -> dict:
    return {
        "device": jax.devices()[0].device_kind,
        "cores": len(os.sched_getaffinity(0)),
        "date": datetime.date.today().isoformat(),
        "versions": versions(("torch", "jax", "jax-tvm-ffi")),
    }


def print_table(part: str, rows: dict) -> None:
    values = list(next(iter(rows.values())))
    table = Table(title=f"us a call, by {part}", box=None, header_style="dim", title_justify="left")
    for heading in ("", *values):
        table.add_column(heading, justify="right")
    for way, row in rows.items():
        table.add_row(way, *(f"{row[value]:,.1f}" for value in values))
    Console(markup=False).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="What calling torch from XLA costs")
    parser.add_argument("-o", "--out", type=Path, help="folder for the report and its picture")
    out = parser.parse_args().out
    report = {"machine": machine(), "us": measure()}
    print(json.dumps(report["machine"], indent=1))
    for part, rows in report["us"].items():
        print_table(part, rows)
    if out:
        path = out / "bridge.json"
        write(path, report)
        print(draw(path, bridge_figure))


if __name__ == "__main__":
    main()

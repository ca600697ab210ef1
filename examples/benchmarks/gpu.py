"""Times paged attention on a CUDA GPU, side by side with its peers.

    export PYTHONPATH=examples XLA_PYTHON_CLIENT_PREALLOCATE=false
    python -m benchmarks.gpu [-o docs/results] [-k decode]
    python -m benchmarks.gpu --lengths [-o docs/results]

A contender is a function that takes a `GpuCase` and returns its microseconds a call. If it raises,
its cell stays empty and the error is printed. The report is written after every contender. With
`--lengths` a few contenders decode sequences of different lengths, of equal ones, and few of them:
those that are served together have different lengths, and a batch is rarely a power of two. To add
a contender, see peers/.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pagedattn_interop
import torch

import pagedattn_torch
from benchmarks import machine
from benchmarks.case import HEADS_SAID, GpuCase
from benchmarks.chosen import chosen
from benchmarks.peers import flashinfer, installed, missing
from benchmarks.peers.gpu import JAX_PEERS, TORCH_PEERS
from benchmarks.plot import draw, gpu_figure
from benchmarks.report import Ceilings, Report, reason_of
from benchmarks.timing import captured, layers_of, seconds_a_call, time_enqueued
from pagedattn import paged_attention

LAYERS = 32


def decodes(count: int, length: int, block_size: int = 16) -> GpuCase:
    return GpuCase(f"decode {count}x{length}", [1] * count, [length] * count, block_size)


def between(count: int, least: int, most: int, block_size: int = 16) -> GpuCase:
    """Decodes of so many sequences; all lengths are equally likely."""
    lengths = np.random.default_rng(1).integers(least, most, count, endpoint=True).tolist()
    return GpuCase(f"decode {count}x({least} to {most})", [1] * count, lengths, block_size)


def decodes_in(block_size: int) -> list[GpuCase]:
    sizes = (64, 4096), (8, 512), (1, 131072), (256, 1024)
    skewed = GpuCase("decode skewed", [1] * 64, [256] * 56 + [16384] * 8, block_size)
    return [*(decodes(*size, block_size) for size in sizes), skewed]


CASES = [
    *decodes_in(16),
    GpuCase("prefill 2x8192", [8192] * 2, [8192] * 2),
    GpuCase("prefill 8x2048", [2048] * 8, [2048] * 8),
    GpuCase("chunk 64x(128 on 4096)", [128] * 64, [4224] * 64),
    GpuCase("mixed 2x4096 + 62x(1 on 4095)", [4096] * 2 + [1] * 62, [4096] * 64),
    GpuCase("verify 64x(8 on 4096)", [8] * 64, [4096] * 64),
]
IN_BLOCKS_OF_64 = decodes_in(64)
STEP = decodes(16, 2048)
LENGTHS_IN_BLOCKS_OF_128 = [
    between(64, 512, 4096, 128),
    *(decodes(*size, 128) for size in ((8, 1024), (2, 4096), (1, 1024), (8, 512))),
    GpuCase("verify 8x(8 on 4096)", [8] * 8, [4096] * 8, 128),
    GpuCase("prefill 2x8192", [8192] * 2, [8192] * 2, 128),
    GpuCase("prefill 1x32768", [32768], [32768], 128),
    GpuCase("chunk 1x(2048 on 32768)", [2048], [34816], 128),
]
LENGTHS = [
    between(64, 512, 4096),
    between(40, 512, 4096),
    between(256, 512, 1536),
    decodes(40, 4096),
    decodes(256, 1036),
    decodes(8, 1024),
    decodes(4, 2048),
    decodes(2, 4096),
    decodes(1, 1024),
    GpuCase("verify 8x(8 on 4096)", [8] * 8, [4096] * 8),
    GpuCase("verify 64x(2 on 4096)", [2] * 64, [4096] * 64),
    *LENGTHS_IN_BLOCKS_OF_128,
    *(case for case in CASES if case.decode),
]


def our_torch(backend: str) -> Callable:
    def prepare(case: GpuCase) -> Callable:
        def call(index, query=case.query):
            batch = case.batches[index % len(case.batches)]
            return pagedattn_torch.paged_attention(query, case.cache, batch, backend=backend)

        return call

    return prepare


def our_jax(backend: str | None) -> Callable:
    def prepare(case: GpuCase) -> tuple[Callable, list]:
        cache, batches = pagedattn_interop.to_jax((case.cache, case.batches))

        def call(query, operands):
            return paged_attention(query, *operands, backend=backend)

        return call, [(cache, batch) for batch in batches]

    return prepare


def cudnn(case: GpuCase) -> tuple[Callable, list]:
    if case.decode:
        raise ValueError("meant for long queries")
    return our_jax("cudnn")(case)


def mosaic(case: GpuCase) -> tuple[Callable, list]:
    if not case.decode:
        raise ValueError("what backend=None takes for long queries")
    return our_jax("mosaic")(case)


def calls_of(case: GpuCase) -> int:
    """The calls in one graph or program: as many as a step has layers, if they are short."""
    return max(LAYERS if case.decode else 8, len(case.batches))


def in_graph(prepare: Callable) -> Callable:
    """Times a torch function by a CUDA graph of several calls, enqueued."""

    def contender(case: GpuCase) -> float:
        call, times = prepare(case), calls_of(case)
        case.require(call(0))
        return time_enqueued(captured(call, times).replay) / times

    return contender


def in_jit(prepare: Callable, checked: bool = False) -> Callable:
    """Times a JAX function by several calls in one jit, enqueued."""

    def contender(case: GpuCase) -> float:
        call, operands = prepare(case)
        query = pagedattn_interop.to_jax(case.query)
        if checked:
            case.require(pagedattn_interop.to_torch(jax.jit(call)(query, operands[0])))
        times = calls_of(case)
        return 1e6 * seconds_a_call(layers_of(call, query, operands, times)) / times

    return contender


OURS = {
    "triton, jax.jit": in_jit(our_jax("triton")),
    "triton, torch graph": in_graph(our_torch("triton")),
    "mosaic, jax.jit": in_jit(mosaic),
    "cudnn, jax.jit": in_jit(cudnn),
    "xformers, jax.jit": in_jit(our_jax("xformers")),
    "flash, jax.jit": in_jit(our_jax("flash")),
    "backend=None, jax.jit": in_jit(our_jax(None)),
}
PEERS = {name: in_graph(peer) for name, peer in TORCH_PEERS.items()}
PEERS |= {name: in_jit(peer, checked=True) for name, peer in JAX_PEERS.items()}
PEERS |= {name: in_graph(peer) for name, peer in flashinfer.FLASHINFER.items()}


def in_eager(prepare: Callable) -> Callable:
    """Times a step of layers called from Python, enqueued."""

    def contender(case: GpuCase) -> float:
        call = prepare(case)

        def step():
            query = case.query
            for layer in range(LAYERS):
                query = call(layer, query)

        return time_enqueued(step) / LAYERS

    return contender


STEPS = {
    backend: {
        "torch eager": in_eager(our_torch(backend)),
        "torch CUDA graph": in_graph(our_torch(backend)),
        "jax.jit": in_jit(our_jax(backend)),
    }
    for backend in ("triton", "xformers", "sdpa")
}


WITH_LENGTHS = (
    "backend=None, jax.jit",
    "triton, torch graph",
    "mosaic, jax.jit",
    "FlashAttention-3",
    "FlashAttention-3, block 128",
)


def measured(contender: Callable, case: GpuCase, ends: float) -> float | str:
    """Microseconds a call, or why there are none."""
    if time.monotonic() > ends:
        return "out of time"
    try:
        return contender(case)
    except Exception as error:
        return reason_of(error)


def run(report: Report, cases: list[GpuCase], contenders: dict[str, Callable], ends: float) -> None:
    """Adds the contenders to the rows of the cases, until the time is over."""
    for case in cases:
        if time.monotonic() < ends:
            row = report.begin(case)
            for name, contender in contenders.items():
                report.add(row, name, measured(contender, case, ends))
            case.free()


def run_step(report: Report, ends: float) -> None:
    """Adds the time of a layer in a step of many, for each backend and each way to call it."""
    us: dict[str, dict[str, float]] = {}
    refused: dict[str, str] = {}
    report.data["step"] = {"case": STEP.name, "layers": LAYERS, "us": us, "refused": refused}
    print(f"{LAYERS} layers of {STEP.name}, us a layer", flush=True)
    for backend, contenders in STEPS.items():
        us[backend] = {}
        for how, contender in contenders.items():
            result = measured(contender, STEP, ends)
            if isinstance(result, str):
                refused[f"{backend}, {how}"] = result
            else:
                us[backend][how] = result
            print(f"  {backend:12}{how:20}{result}", flush=True)
        report.write()
    STEP.free()


def new_report(folder: Path | None, suffix: str) -> Report:
    about = machine.gpu(HEADS_SAID)
    ceilings = Ceilings(about["copy_tb_s"] * 1e12, about["matmul_tflop_s"] * 1e12)
    model = next(word for word in about["gpu"].split() if any(map(str.isdigit, word)))
    name = model.lower() + suffix
    path = folder and folder / f"{name}.json"
    return Report(path, about, list(OURS), ceilings, step={})


def run_all(folder: Path | None, names: list[str], seconds: float, build_seconds: float) -> None:
    """Measures everything, the most important first."""
    # Before the rest: with other work on the host, short calls of jax.jit take twice as long.
    no_flashinfer = missing("FlashInfer") or flashinfer.build(build_seconds)
    report, ends = new_report(folder, ""), time.monotonic() + seconds
    contenders = OURS | installed(PEERS, report.miss)
    if no_flashinfer and not missing("FlashInfer"):
        report.miss("FlashInfer", no_flashinfer)
        contenders = {name: one for name, one in contenders.items() if "FlashInfer" not in name}
    run(report, [case for case in CASES if case.name in names], contenders, ends)
    run_step(report, ends)
    run(report, [case for case in IN_BLOCKS_OF_64 if case.name in names], contenders, ends)
    if report.path:
        print(draw(report.path, gpu_figure))


def run_lengths(folder: Path | None, names: list[str], seconds: float) -> None:
    report, ends = new_report(folder, "_lengths"), time.monotonic() + seconds
    contenders = OURS | installed(PEERS, report.miss)
    contenders = {name: one for name, one in contenders.items() if name in WITH_LENGTHS}
    run(report, [case for case in LENGTHS if case.name in names], contenders, ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--out", type=Path, help="folder for the report and its picture")
    parser.add_argument("-k", "--only", default="", help="cases whose name contains this")
    parser.add_argument("--lengths", action="store_true", help="sequences of different lengths")
    parser.add_argument("--seconds", type=float, default=600, help="after which none is begun")
    parser.add_argument("--build-seconds", type=float, default=240, help="FlashInfer's kernels")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no NVIDIA GPU; benchmarks.cpu times a CPU")
    cases = LENGTHS if given.lengths else [*CASES, *IN_BLOCKS_OF_64]
    names = chosen(parser, given.only, [case.name for case in cases])
    if given.lengths:
        run_lengths(given.out, names, given.seconds)
    else:
        run_all(given.out, names, given.seconds, given.build_seconds)


if __name__ == "__main__":
    # FlashInfer compiles with ninja, which is installed beside this Python.
    os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)
    main()

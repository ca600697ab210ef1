"""Times paged attention on a CUDA GPU, side by side with its peers.

    export PYTHONPATH=examples XLA_PYTHON_CLIENT_PREALLOCATE=false
    python -m benchmarks.gpu [-o docs/results] [-k decode]

A contender is a function that takes a `Case` and returns its microseconds a call. If it raises, its
cell stays empty and the error is printed. The report is written after every case. To add a
contender, see peers.py.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import pagedattn_interop

import pagedattn_torch
from benchmarks.case import CASES, STEP, Case
from benchmarks.chart import draw
from benchmarks.decodes import after
from benchmarks.enqueued import seconds_a_call
from benchmarks.flashinfer_peers import FLASHINFER, build
from benchmarks.peers import JAX_PEERS, TORCH_PEERS
from benchmarks.report import Report
from benchmarks.timing import captured, time_enqueued
from pagedattn import paged_attention

LAYERS = 32


def our_torch(backend: str) -> Callable:
    def prepare(case: Case) -> Callable:
        def call(index, query=case.query):
            batch = case.batches[index % len(case.batches)]
            return pagedattn_torch.paged_attention(query, case.cache, batch, backend=backend)

        return call

    return prepare


def our_jax(backend: str | None) -> Callable:
    def prepare(case: Case) -> tuple[Callable, list]:
        cache, batches = pagedattn_interop.to_jax((case.cache, case.batches))

        def call(query, operands):
            return paged_attention(query, *operands, backend=backend)

        return call, [(cache, batch) for batch in batches]

    return prepare


def cudnn(case: Case) -> tuple[Callable, list]:
    if case.decode:
        raise ValueError("meant for long queries")
    return our_jax("cudnn")(case)


def mosaic(case: Case) -> tuple[Callable, list]:
    if not case.decode:
        raise ValueError("what backend=None takes for long queries")
    return our_jax("mosaic")(case)


def calls_of(case: Case) -> int:
    """The calls in one graph or program: as many as a step has layers, if they are short."""
    return max(LAYERS if case.decode else 8, len(case.batches))


def in_graph(prepare: Callable) -> Callable:
    """Times a torch function by a CUDA graph of several calls, enqueued."""

    def contender(case: Case) -> float:
        call, times = prepare(case), calls_of(case)
        case.require(call(0))
        return time_enqueued(captured(call, times).replay) / times

    return contender


def in_jit(prepare: Callable, checked: bool = False) -> Callable:
    """Times a JAX function by several calls in one jit, enqueued."""

    def contender(case: Case) -> float:
        call, operands = prepare(case)
        if checked:
            query = pagedattn_interop.to_jax(case.query)
            case.require(pagedattn_interop.to_torch(jax.jit(call)(query, operands[0])))
        times = calls_of(case)
        return 1e6 * seconds_a_call(_layers_in_jit(case, call, operands, times)) / times

    return contender


def _layers_in_jit(case, call, operands, layers) -> Callable:
    query = pagedattn_interop.to_jax(case.query)

    @jax.jit
    def step(query, operands):
        for layer in range(layers):
            query = call(*after(query, operands[layer % len(operands)]))
        return query

    return lambda: step(query, operands)


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
FLASHINFER_PEERS = {name: in_graph(peer) for name, peer in FLASHINFER.items()}


def in_eager(prepare: Callable) -> Callable:
    """Times a step of layers called from Python, enqueued."""

    def contender(case: Case) -> float:
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


def run(report: Report, only: str, flashinfer_misses: str | None) -> None:
    """Measures everything, the most important first."""
    if flashinfer_misses:
        report.miss("FlashInfer", flashinfer_misses)
    contenders = OURS | PEERS | ({} if flashinfer_misses else FLASHINFER_PEERS)
    cases = [case for case in CASES if only in case.name]
    for case in cases:
        if case.block_size == 16:
            report.measure(case, contenders)
    report.measure_step(STEP, LAYERS, STEPS)
    for case in cases:
        if case.block_size != 16:
            report.measure(case, contenders)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--out", type=Path, help="folder for the report and its picture")
    parser.add_argument("-k", "--only", default="", help="cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=600, help="after which none is begun")
    parser.add_argument("--build-seconds", type=float, default=240, help="FlashInfer's kernels")
    arguments = parser.parse_args()
    # Before the rest: with other work on the host, short calls of jax.jit take twice as long.
    flashinfer_misses = build(arguments.build_seconds)
    report = Report(arguments.out, arguments.seconds, ours=list(OURS))
    run(report, arguments.only, flashinfer_misses)
    if report.path:
        print(draw(report.path))


if __name__ == "__main__":
    # FlashInfer compiles with ninja, which is installed beside this Python.
    os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)
    main()

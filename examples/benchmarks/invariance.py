"""Times `batch_invariant=True` beside the default, and counts the bits that company changes.

    export PYTHONPATH=examples XLA_PYTHON_CLIENT_PREALLOCATE=false
    python -m benchmarks.invariance [-o invariance.json] [-k decode]

By `triton` on a CUDA GPU, in CUDA graphs; else by `numba`, in jax.jit. Both take turns; a figure is
the median of turns.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pagedattn_interop
import torch

import pagedattn_torch
from benchmarks import machine
from benchmarks.case import HEADS_SAID, Case, CpuCase, GpuCase
from benchmarks.chosen import chosen
from benchmarks.invariance_bits import KINDS, differing
from benchmarks.turns import in_turns, of_arrays, of_graphs
from pagedattn import KVCache, paged_attention

DEFAULT, MODE = "default", "batch_invariant"


def shapes(cuda: bool) -> dict[str, tuple[list[int], list[int]]]:
    """Query lengths and sequence lengths, by name."""
    return gpu_shapes() if cuda else cpu_shapes()


def gpu_shapes() -> dict[str, tuple[list[int], list[int]]]:
    lengths = np.random.default_rng(1).integers(512, 4096, 64, endpoint=True).tolist()
    return {
        "decode 64x4096": ([1] * 64, [4096] * 64),
        "decode 8x4096": ([1] * 8, [4096] * 8),
        "decode 1x1024": ([1], [1024]),
        "decode 256x1024": ([1] * 256, [1024] * 256),
        "decode 64x(512 to 4096)": ([1] * 64, lengths),
        "decode 1x32768": ([1], [32768]),
        "verify 64x(8 on 4096)": ([8] * 64, [4096] * 64),
        "verify 8x(8 on 4096)": ([8] * 8, [4096] * 8),
        "prefill 1x2048": ([2048], [2048]),
        "prefill 2x8192": ([8192] * 2, [8192] * 2),
        "prefill 4x512": ([512] * 4, [512] * 4),
    }


def cpu_shapes() -> dict[str, tuple[list[int], list[int]]]:
    return {
        "decode 8x4096": ([1] * 8, [4096] * 8),
        "decode 1x32768": ([1], [32768]),
        "decode 64x512": ([1] * 64, [512] * 64),
        "verify 8x(8 on 4096)": ([8] * 8, [4096] * 8),
        "prefill 1x2048": ([2048], [2048]),
        "prefill 4x512": ([512] * 4, [512] * 4),
        "mixed": ([256, 256] + [1] * 6, [256, 2048] + [2048] * 6),
    }


def attend(query, cache, batch, name: str):
    return pagedattn_torch.paged_attention(
        query, cache, batch, backend="triton", batch_invariant=name == MODE
    )


def on_gpu(case: GpuCase, name: str) -> Callable[[], float]:
    """`seconds()` of a call, from a turn of graphs."""
    calls = max(8, len(case.batches))

    def call(index):
        return attend(case.query, case.cache, case.batches[index % len(case.batches)], name)

    right = attend(case.query, case.cache, case.batches[0], DEFAULT).float()
    wrong = (call(0).float() - right).norm() / right.norm()
    if not wrong < case.tolerance:
        raise ValueError(f"its answer differs by {wrong.item():.1%}")
    return of_graphs(call, calls)


def on_cpu(case: CpuCase, name: str) -> Callable[[], float]:
    """`seconds()` of a call."""
    query, cache = pagedattn_interop.to_jax((case.query, KVCache(*case.planes)))
    mode = {"backend": "numba", "batch_invariant": name == MODE}
    run, batch = jax.jit(partial(paged_attention, **mode)), case.batch
    case.require(pagedattn_interop.to_torch(run(query, cache, batch)))
    return of_arrays(run, query, cache, batch)


def row_of(case: Case, us: dict[str, float | str]) -> str:
    """A line of the table: the default's time, and the mode's over it."""
    base, mode = us[DEFAULT], us[MODE]
    if isinstance(base, str) or isinstance(mode, str):
        return f"{case.shape:26}{base}, {mode}"
    return f"{case.shape:26}{base:10.1f}{mode / base:8.3f}"


def run(cuda: bool, names: list[str], seconds: float) -> dict:
    """The tables, printed as they are measured."""
    ends = time.monotonic() + seconds
    report: dict = {"machine": machine.gpu(HEADS_SAID) if cuda else machine.cpu(HEADS_SAID)}
    print(json.dumps(report["machine"]))
    print(f"{'us, and over it':26}{DEFAULT:>10}{'mode':>8}", flush=True)
    report["us"] = {}
    for shape, lens in shapes(cuda).items():
        if shape in names:
            case = (GpuCase if cuda else CpuCase)(shape, *lens)
            report["us"][shape] = in_turns(
                partial(on_gpu if cuda else on_cpu, case), (DEFAULT, MODE)
            )
            print(row_of(case, report["us"][shape]), flush=True)
            case.free()
    report["differing"] = {}
    for name in KINDS if cuda else ():
        found = differing(name) if time.monotonic() < ends else "left out: no time"
        report["differing"][name] = found
        print(f"{name}: numbers that differ: {found}", flush=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("-k", "--only", default="", help="cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=130, help="after which no check is begun")
    given = parser.parse_args()
    cuda = torch.cuda.is_available()
    report = run(cuda, chosen(parser, given.only, shapes(cuda)), given.seconds)
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Times decodes of different lengths, of equal ones and of few sequences on a GPU, with a peer.

    export PYTHONPATH=examples:. XLA_PYTHON_CLIENT_PREALLOCATE=false
    python -m benchmarks.lengths [-o docs/results]

Sequences that are served together have different lengths, and a batch is rarely a power of two.
The report is that of gpu.py, under a name of its own.
"""

import argparse
from pathlib import Path

import numpy as np

from benchmarks.case import CASES, Case
from benchmarks.gpu import OURS, PEERS
from benchmarks.report import Report

SECONDS = 420
CONTENDERS = (
    "backend=None, jax.jit",
    "triton, torch graph",
    "mosaic, jax.jit",
    "FlashAttention-3",
    "FlashAttention-3, block 128",
)


def between(count: int, least: int, most: int) -> Case:
    """Decodes of so many sequences; all lengths are equally likely."""
    lengths = np.random.default_rng(1).integers(least, most, count, endpoint=True).tolist()
    return Case(f"decode {count}x({least} to {most})", [1] * count, lengths)


DIFFERENT = [
    between(64, 512, 4096),
    between(40, 512, 4096),
    between(256, 512, 1536),
    Case("decode 40x4096", [1] * 40, [4096] * 40),
    Case("decode 256x1036", [1] * 256, [1036] * 256),
]
FEW = [
    Case("decode 8x1024", [1] * 8, [1024] * 8),
    Case("decode 4x2048", [1] * 4, [2048] * 4),
    Case("decode 2x4096", [1] * 2, [4096] * 2),
]
EQUAL = [case for case in CASES if case.decode and case.block_size == 16]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--out", type=Path, help="folder for the report")
    arguments = parser.parse_args()
    report = Report(arguments.out, SECONDS, ours=list(OURS), suffix="_lengths")
    contenders = {name: call for name, call in (OURS | PEERS).items() if name in CONTENDERS}
    for case in DIFFERENT + FEW + EQUAL:
        report.measure(case, contenders)


if __name__ == "__main__":
    main()

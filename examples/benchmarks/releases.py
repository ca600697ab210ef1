"""Times releases of the library side by side, and draws how much faster each is than the first.

    git worktree add ../0.2.0 f6e6d73
    PYTHONPATH=examples python -m benchmarks.releases ../0.2.0 . [-o docs/results/releases_cpu.json]

Each runs in a process of its own, in the same environment, as layers of one program; they take
turns.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import jax

from benchmarks import machine
from benchmarks.case import HEADS_SAID
from benchmarks.plot import draw, releases_figure
from benchmarks.releases_worker import LAYERS

WORKER = Path(__file__).with_name("releases_worker.py")
TURNS, SECONDS = 15, 0.05  # turns of each release, and seconds of a turn at least
SHAPES = {
    "decode 64 x 4096": ([1] * 64, [4096] * 64),
    "decode 8 x 4096": ([1] * 8, [4096] * 8),
    "decode 1 x 32768": ([1], [32768]),
    "decode 64 x 512": ([1] * 64, [512] * 64),
    "decode 1 x 1024": ([1], [1024]),
    "decode 7 x 256 + 1 x 16384": ([1] * 8, [256] * 7 + [16384]),
    "verify 64 x (8 on 4096)": ([8] * 64, [4096] * 64),
    "verify 8 x (8 on 4096)": ([8] * 8, [4096] * 8),
    "prefill 2 x 8192": ([8192] * 2, [8192] * 2),
    "prefill 1 x 2048": ([2048], [2048]),
    "prefill 4 x 512": ([512] * 4, [512] * 4),
    "512 on 512 + 7 x (1 on 1023)": ([512] + [1] * 7, [1024] * 8),
}
CPU_KEYS = 1 << 16  # a CPU is given batches with so many keys at most, and prompts of 2048


class Release:
    """A process with the release in a folder."""

    def __init__(self, folder: str) -> None:
        root = Path(folder).resolve()
        paths = os.pathsep.join(map(str, (root, root / "interop")))
        self._process = subprocess.Popen(
            [sys.executable, "-P", WORKER],
            env=os.environ | {"PYTHONPATH": os.pathsep.join((paths, *sys.path[1:]))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version = self.ask()["version"]

    def ask(self, **question: Any) -> dict:
        """ValueError if it cannot."""
        process: Any = self._process
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline() or '{"error": "it died"}')
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    def seconds(self, calls: int) -> float:
        return self.ask(calls=calls)["seconds"]

    def end(self) -> None:
        """Its input ends, and so it does."""
        self._process.communicate()


def measure(releases: list[Release], shape: str) -> dict[str, float | str]:
    """Microseconds of a layer by each release, the median of its turns, or why there is none."""
    found: dict[str, float | str] = {}
    times: dict[Release, list[float]] = {}
    for release in releases:
        try:
            release.ask(query_lens=SHAPES[shape][0], seq_lens=SHAPES[shape][1])
            times[release] = []
        except ValueError as error:
            found[release.version] = str(error)
    calls = {release: 1 + round(SECONDS / LAYERS / release.seconds(1)) for release in times}
    for _ in range(TURNS):
        for release in random.sample(list(times), len(times)):
            times[release].append(release.seconds(calls[release]))
    return found | {r.version: round(1e6 * median(taken), 2) for r, taken in times.items()}


def fits(shape: str) -> bool:
    """Whether a shape is timed on this device."""
    query_lens, seq_lens = SHAPES[shape]
    return jax.default_backend() == "gpu" or (sum(seq_lens) <= CPU_KEYS and max(query_lens) <= 2048)


def started(parser: argparse.ArgumentParser, folders: list[str]) -> list[Release]:
    """The releases, which are told apart by their versions."""
    for folder in folders:
        if not Path(folder, "pagedattn/__init__.py").exists():  # else what is installed is timed
            parser.error(f"{folder} is no checkout of a release: it has no pagedattn/__init__.py")
    releases = [Release(folder) for folder in folders]
    versions = [release.version for release in releases]
    if len({*versions}) < len(versions):
        for release in releases:
            release.end()
        parser.error(f"the folders must have different versions, got {', '.join(versions)}")
    return releases


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="+", help="releases, the oldest first")
    parser.add_argument("-o", "--out", type=Path, help="write the figures there, and the picture")
    given = parser.parse_args()
    releases = started(parser, given.folders)
    about = (machine.gpu if jax.default_backend() == "gpu" else machine.cpu)(HEADS_SAID)
    report = {"machine": about, "versions": [r.version for r in releases], "us": {}}
    for shape in filter(fits, SHAPES):
        report["us"][shape] = measure(releases, shape)
        print(f"{shape:30}{report['us'][shape]}", flush=True)
    for release in releases:
        release.end()
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")
        print(draw(given.out, releases_figure))


if __name__ == "__main__":
    main()

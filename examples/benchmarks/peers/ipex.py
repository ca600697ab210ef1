"""IPEX as a contender of cpu.py, in a process of its own: it needs a torch of its own.

Run as a script, this file is that process: it answers each line of JSON on stdin by one on stdout.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.case import HEADS, KV_HEADS, SCALE, CpuCase

EXAMPLES = Path(__file__).parents[2]
PYTHON = EXAMPLES.parent / ".venv-ipex/bin/python"
WORKER = ["-m", "benchmarks.peers.ipex"]
CURE = "make test-ipex makes .venv-ipex, which it runs in"


class Ipex:
    """The process with IPEX: a context manager that starts it and ends it."""

    def __enter__(self) -> "Ipex":
        self._folder = tempfile.TemporaryDirectory()
        if not PYTHON.exists():
            self.versions = None
            return self
        errors = subprocess.DEVNULL
        self._process = subprocess.Popen(
            [PYTHON, *WORKER],
            cwd=EXAMPLES,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        self.versions = self._ask({})["versions"]
        return self

    def __exit__(self, *_) -> None:
        if self.versions is not None:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def contender(self, case: CpuCase) -> Callable:
        """Prepares the case in that process; each call runs it there, and returns its seconds."""
        path = f"{self._folder.name}/out.npy"
        self._ask({"case": case.as_dict(), "out": path})
        case.require(torch.from_numpy(np.load(path)))
        return lambda: self._ask({"run": True})["seconds"]

    def _ask(self, question: dict) -> dict:
        process: Any = self._process
        process.stdin.write(json.dumps(question).encode() + b"\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline() or '{"error": "it died"}')
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer


def prepare(case: CpuCase) -> Callable:
    """The raw operators, on a cache in the layout that they want."""
    paged = importlib.import_module("intel_extension_for_pytorch.llm.modules").PagedAttention
    out = torch.empty_like(case.query)
    # [num_blocks, kv_heads, block_size, head_dim]: flash_attn_varlen_func reads no other layout.
    key, value = (plane.transpose(1, 2).contiguous() for plane in case.planes)
    lens = torch.tensor(case.seq_lens, dtype=torch.int32)
    if case.decode:
        mapping = torch.arange(HEADS, dtype=torch.int32) * KV_HEADS // HEADS
        about = mapping, SCALE, case.tables, lens, case.block_size, max(case.seq_lens), None
        attend, arguments = paged.single_query_cached_kv_attention, about
    else:
        starts = torch.tensor(case.starts, dtype=torch.int32)
        ends = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
        longest = max(case.query_lens), max(case.seq_lens)
        arguments = starts, ends, *longest, SCALE, True, case.tables, None
        attend = paged.flash_attn_varlen_func

    def call():
        attend(out, case.query, key, value, *arguments)
        return out

    return call


def serve(answers) -> None:
    """Answers questions until stdin ends: each is a case to prepare, or to run the last one."""
    ipex = importlib.import_module("intel_extension_for_pytorch")
    versions = {"intel_extension_for_pytorch": ipex.__version__, "its torch": torch.__version__}
    call: Any = None
    for line in sys.stdin:
        question = json.loads(line)
        answer: dict = {"versions": versions}
        try:
            if "case" in question:
                call = None  # frees the last case's memory
                call = prepare(CpuCase(**question["case"]))
                np.save(question["out"], call().float().numpy())
            elif "run" in question:
                start = time.perf_counter()
                call()
                answer = {"seconds": time.perf_counter() - start}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    # Answers get stdout to themselves: whatever the extension prints goes to stderr.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        serve(answers)

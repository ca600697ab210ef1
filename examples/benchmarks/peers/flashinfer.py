"""FlashInfer's wrappers on a GPU.

FlashInfer compiles its kernels on first use, which takes minutes and all cores: `build` does so in
a process of its own before anyone is timed. Run as a script, this file is that process.
"""

import contextlib
import importlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.case import HEAD_DIM, HEADS, KV_HEADS, GpuCase

WORKSPACE_BYTES = 512 << 20


def build(seconds: float) -> str | None:
    """Compiles FlashInfer's kernels; says why they cannot be used, None if they can."""
    command = [sys.executable, "-m", "benchmarks.peers.flashinfer"]
    with tempfile.TemporaryFile("w+") as errors:
        output: Any = {"stdout": subprocess.DEVNULL, "stderr": errors}
        process = subprocess.Popen(command, process_group=0, **output)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "its kernels were not compiled in the time given"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
        errors.seek(0)
        lines = errors.read().strip().splitlines() or [""]
        return lines[-1][:200] if code else None


def decode(case: GpuCase) -> Callable:
    """BatchDecodeWithPagedKVCacheWrapper."""
    if max(case.query_lens) > 1:
        raise ValueError("one query a sequence")
    return _calls(case, "BatchDecodeWithPagedKVCacheWrapper", (), {})


def prefill(case: GpuCase) -> Callable:
    """BatchPrefillWithPagedKVCacheWrapper, on tensor cores: FlashAttention-3's on Hopper."""
    starts = torch.tensor(case.starts, dtype=torch.int32)
    return _calls(case, "BatchPrefillWithPagedKVCacheWrapper", (starts,), {"causal": True})


def _calls(case, name, queries, options) -> Callable:
    """A wrapper planned for each set of tables; not timed: a step plans once for all layers."""
    wrapper = getattr(importlib.import_module("flashinfer"), name)
    room = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    planned = [wrapper(room, "NHD") for _ in case.batches]
    for one, batch in zip(planned, case.batches, strict=True):
        heads = (HEADS, KV_HEADS, HEAD_DIM, case.block_size)
        one.plan(*queries, *_pages(case, batch), *heads, q_data_type=torch.bfloat16, **options)
    planes = case.cache.key, case.cache.value
    return lambda index: planned[index % len(planned)].run(case.query, planes)


def _pages(case, batch) -> tuple[torch.Tensor, ...]:
    """(where each sequence's pages start, the pages, how full each sequence's last page is)."""
    starts = torch.tensor([0, *itertools.accumulate(case.counts)], dtype=torch.int32)
    rows = zip(batch.block_tables, case.counts, strict=True)
    last = torch.tensor([(n - 1) % case.block_size + 1 for n in case.seq_lens], dtype=torch.int32)
    return starts, torch.cat([row[:count] for row, count in rows]), last


def generation() -> str:
    """The newest of FlashInfer's kernels that the GPU runs."""
    return "fa3" if torch.cuda.get_device_capability() == (9, 0) else "fa2"


def compile_kernels() -> None:
    jit = importlib.import_module("flashinfer.jit")
    dtypes = (torch.bfloat16,) * 3 + (torch.int32,)
    options = (HEAD_DIM, HEAD_DIM, 0, False, False)
    modules = [
        jit.gen_batch_prefill_module(generation(), *dtypes, *options, False),
        jit.gen_batch_decode_module(*dtypes, *options),
    ]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda module: module.build_and_load(), modules))


FLASHINFER = {"FlashInfer decode": decode, "FlashInfer prefill": prefill}

if __name__ == "__main__":
    os.nice(10)
    compile_kernels()

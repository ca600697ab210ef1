"""Times paged attention on a CUDA GPU, side by side: decode, verification, chunks and prefill.

    XLA_PYTHON_CLIENT_PREALLOCATE=false python examples/bench_gpu.py [-o docs/results] [-k decode]

A contender takes a `Case` and returns a function of one set of tables, safe to capture in a CUDA
graph; a refusal (any exception) leaves its cell empty. To add one, add it to CONTENDERS.
"""

import argparse
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import torch
import triton

import interop
import pagedattn_torch
from pagedattn import BatchMetadata, KVCache, paged_attention

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
CALLS_A_STEP = 32  # in one jit: layers of a model
L2_BYTES = 200 << 20  # what repeated calls must read between two visits of one page, at least


@dataclass
class Case:
    """One shape: bfloat16 tensors on the GPU, with several sets of tables over one cache."""

    name: str
    query_lens: list[int]
    seq_lens: list[int]
    block_size: int = 16
    query: torch.Tensor = field(init=False, repr=False)
    cache: KVCache = field(init=False, repr=False)
    batches: list[BatchMetadata] = field(init=False, repr=False)

    @property
    def kv_bytes(self) -> int:
        return sum(self.seq_lens) * KV_HEADS * HEAD_DIM * 2 * 2

    @property
    def flops(self) -> float:
        pairs = sum(
            q * (n - q) + q * (q + 1) / 2
            for q, n in zip(self.query_lens, self.seq_lens, strict=True)
        )
        return 4 * HEADS * HEAD_DIM * pairs

    @property
    def decode(self) -> bool:
        return max(self.query_lens) <= 8

    def allocate(self) -> "Case":
        torch.manual_seed(0)
        sets = max(1, -(-L2_BYTES // self.kv_bytes))
        needed = [-(-n // self.block_size) for n in self.seq_lens]
        num_blocks = sets * sum(needed)
        shape = num_blocks, self.block_size, KV_HEADS, HEAD_DIM
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.query = torch.randn(sum(self.query_lens), HEADS, HEAD_DIM, **options)
        self.cache = KVCache(torch.randn(shape, **options), torch.randn(shape, **options))
        ids = torch.randperm(num_blocks).int().split(sum(needed))
        self.batches = [self._batch(part, needed) for part in ids]
        return self

    def _batch(self, ids, needed) -> BatchMetadata:
        tables = torch.full((len(needed), max(needed)), -1, dtype=torch.int32)
        for row, part in zip(tables, ids.split(needed), strict=True):
            row[: len(part)] = part
        starts = [0, *itertools.accumulate(self.query_lens)]
        tokens = torch.zeros(starts[-1], dtype=torch.int32, device="cuda")
        return BatchMetadata(
            block_tables=tables.cuda(),
            seq_lens=torch.tensor(self.seq_lens, dtype=torch.int32, device="cuda"),
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device="cuda"),
            slot_mapping=tokens - 1,
            positions=tokens,
            block_size=self.block_size,
            max_query_len=max(self.query_lens),
        )


CASES = [
    Case("decode 64x4096", [1] * 64, [4096] * 64),
    Case("decode 1x131072", [1], [131072]),
    Case("decode 256x1024", [1] * 256, [1024] * 256),
    Case("decode skewed", [1] * 64, [256] * 56 + [16384] * 8),
    Case("decode 8x512", [1] * 8, [512] * 8),
    Case("decode 64x4096, block 64", [1] * 64, [4096] * 64, 64),
    Case("verify 64x(8 on 4096)", [8] * 64, [4096] * 64),
    Case("chunk 64x(128 on 4096)", [128] * 64, [4224] * 64),
    Case("mixed 2x4096 + 62x(1 on 4095)", [4096] * 2 + [1] * 62, [4096] * 64),
    Case("prefill 8x2048", [2048] * 8, [2048] * 8),
    Case("prefill 2x8192", [8192] * 2, [8192] * 2),
    Case("prefill 2x8192, block 128", [8192] * 2, [8192] * 2, 128),
]


def in_torch(backend: str) -> Callable:
    """The torch function, captured in a CUDA graph."""

    def prepare(case: Case) -> float:
        def call(batch):
            pagedattn_torch.paged_attention(case.query, case.cache, batch, backend=backend)

        return time_graph(call, case.batches)

    return prepare


def in_jit(backend: str) -> Callable:
    """The JAX function, several calls in one jit."""

    def prepare(case: Case) -> float:
        query, cache, batches = map(interop.to_jax, (case.query, case.cache, case.batches))
        rounds = max(1, CALLS_A_STEP // len(batches))

        @jax.jit
        def calls(query: Any, cache, batches):
            for batch in batches * rounds:
                # The next call takes what this one gave: none is dropped or moved.
                query = paged_attention(query, cache, batch, backend=backend)
            return query

        return time_calls(lambda: calls(query, cache, batches)) / (rounds * len(batches))

    return prepare


CONTENDERS = {
    "triton, torch graph": in_torch("triton"),
    "triton, jax.jit": in_jit("triton"),
}


def time_graph(call: Callable, batches: list) -> float:
    """Microseconds of a call, from replays of a CUDA graph of several."""
    rounds = max(1, 8 // len(batches))
    call(batches[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for batch in batches * rounds:
            call(batch)
    return time_alone(graph.replay) / (rounds * len(batches))


def time_alone(call: Callable) -> float:
    """Microseconds of a call on the device, which is idle before."""
    call()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def time_calls(call: Callable) -> float:
    """Microseconds of a call that is enqueued again before the device has finished."""
    jax.block_until_ready(call())
    times = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready([call() for _ in range(10)][-1])
        times.append((time.perf_counter() - start) / 10 * 1e6)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """TB/s of a device-to-device copy, read and written."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * len(source) / time_alone(lambda: target.copy_(source)) / 1e6


def matmul_rate() -> float:
    """TFLOP/s of a bfloat16 product of random 8192 x 8192 matrices."""
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / time_alone(lambda: a @ b) / 1e6


def measure(case: Case) -> dict[str, float | None]:
    case.allocate()
    return {name: _time_or_none(contender, case) for name, contender in CONTENDERS.items()}


def _time_or_none(contender, case):
    try:
        return contender(case)
    except Exception as error:
        print(f"  {case.name}: {type(error).__name__}: {str(error)[:120]}")
        return None


def cell(case: Case, microseconds: float | None) -> str:
    if microseconds is None:
        return "-"
    if case.decode:
        return f"{microseconds:.1f} us {case.kv_bytes / microseconds / 1e6:.2f} TB/s"
    return f"{microseconds:.0f} us {case.flops / microseconds / 1e6:.0f} TFLOP/s"


def machine() -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "jax": jax.__version__,
        "triton": triton.__version__,
        "copy": f"{copy_bandwidth():.2f} TB/s",
        "bf16 matmul": f"{matmul_rate():.0f} TFLOP/s",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--out", type=Path, help="folder for bench_gpu.json")
    parser.add_argument("-k", "--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(f"{'':30}" + "".join(f"{name:>28}" for name in CONTENDERS))
    results = {}
    for case in CASES:
        if arguments.only not in case.name:
            continue
        times = measure(case)
        print(f"{case.name:30}" + "".join(f"{cell(case, t):>28}" for t in times.values()))
        results[case.name] = {"kv_bytes": case.kv_bytes, "flops": case.flops, "us": times}
        del case.query, case.cache, case.batches
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        report = json.dumps({"machine": about, "results": results}, indent=1)
        (arguments.out / "bench_gpu.json").write_text(report + "\n")


if __name__ == "__main__":
    main()

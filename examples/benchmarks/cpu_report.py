"""The report of a cpu.py run: tables, and a JSON file that grows with it."""

import datetime
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cpu_case import Case
from benchmarks.machine import facts_of_cpu, processor, versions, write
from benchmarks.work import HEAD_DIM, HEADS, KV_HEADS, SUM

# The ratios that the library aims at: speed of the first contender over that of the second.
AIMS = {
    "numba / IPEX": ("numba, jax.jit", "IPEX"),
    "numba / sum": ("numba, jax.jit", SUM),
    "numba / sdpa": ("numba, jax.jit", "sdpa, jax.jit"),
    "sdpa / IPEX": ("sdpa, jax.jit", "IPEX"),
    "sdpa / dense": ("sdpa, jax.jit", "torch SDPA, dense"),
    "xla / gather": ("xla, jax.jit", "JAX gather + einsum"),
    "xla / sdpa": ("xla, jax.jit", "sdpa, jax.jit"),
}
SHORT_FLOATS = "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16"


class Report:
    """The results so far: printed as they come, and kept in a file."""

    def __init__(
        self,
        folder: Path | None,
        ours: list[str],
        ipex_versions: dict | None,
        threads: int | None = None,
    ):
        self.data: dict[str, Any] = {"machine": machine(), "ours": ours, "cases": {}}
        self.data["machine"]["versions"] |= ipex_versions or {}
        self.path = folder / "cpu.json" if folder else None
        self.file = self.data
        if self.path and threads:
            self.file = json.loads(self.path.read_text())
            self.file.setdefault("on_fewer_threads", {})[str(threads)] = self.data
        print(json.dumps(self.data["machine"], indent=1), flush=True)

    def add(self, case: Case, us: dict[str, float], refused: dict[str, str]) -> None:
        row = {"kv_bytes": case.kv_bytes, "flops": case.flops, "decode": case.decode}
        row |= {"dtype": case.dtype_name, "us": us, "refused": refused}
        self.data["cases"][case.name] = row
        print(case.name, flush=True)
        for name, microseconds in us.items():
            print(f"  {name:24}{microseconds / 1e3:10.2f} ms {_rate(row, name):>8}", flush=True)
        for name, reason in refused.items():
            print(f"  {name:24}{'-':>10}    {reason}", flush=True)
        write(self.path, self.file)

    def print_tables(self) -> None:
        for decode in (True, False):
            rows = {k: row for k, row in self.data["cases"].items() if row["decode"] is decode}
            if rows:
                Console(width=200, markup=False).print(
                    _table(rows, "GB/s of K and V" if decode else "GFLOP/s")
                )


def _table(rows: dict[str, dict], unit: str) -> Table:
    names = list(dict.fromkeys(name for row in rows.values() for name in row["us"]))
    table = Table(title=unit, box=None, header_style="dim")
    table.add_column("")
    for heading in [*names, *AIMS]:
        table.add_column(heading, justify="right")
    for case, row in rows.items():
        shares = (_times_as_fast(row["us"], *pair) for pair in AIMS.values())
        table.add_row(case, *(_rate(row, name) for name in names), *shares)
    return table


def _rate(row, name) -> str:
    if name not in row["us"]:
        return "-"
    return f"{row['kv_bytes' if row['decode'] else 'flops'] / row['us'][name] / 1e3:.1f}"


def _times_as_fast(us, ours, other) -> str:
    return f"{us[other] / us[ours]:.2f}" if ours in us and other in us else "-"


def machine() -> dict:
    """The machine and the versions that were measured, with the machine's ceilings."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
        "heads": f"{HEADS} query heads, {KV_HEADS} KV heads, head_dim {HEAD_DIM}",
        "matmul_gflop_s": {
            name: round(_matmul_rate(getattr(torch, name)) / 1e9)
            for name in ("float32", "bfloat16")
        },
        "versions": versions(("torch", "jax", "jax-tvm-ffi", "numba")),
    }


def _cpu() -> str:
    """The CPU's name, and which of the instructions for short floats it has."""
    flags = facts_of_cpu().get("flags", "").split()
    return f"{processor()} ({', '.join(flag for flag in SHORT_FLOATS if flag in flags)})"


def _matmul_rate(dtype: torch.dtype) -> float:
    a, b = torch.randn(2, 2048, 2048).to(dtype)
    return 2 * 2048**3 / _seconds(lambda: a @ b)


def _seconds(call) -> float:
    """The shortest of some calls: what the machine can do undisturbed."""
    times = []
    for _ in range(12):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)

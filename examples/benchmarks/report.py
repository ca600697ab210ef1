"""The report of a gpu.py run: a table, and a JSON file that grows with it."""

import datetime
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.case import Case
from benchmarks.machine import versions, write
from benchmarks.timing import copy_bandwidth, matmul_rate
from benchmarks.work import HEAD_DIM, HEADS, KV_HEADS

PACKAGES = ("torch", "jax", "triton", "xformers", "flashinfer-python", "flash-attn-4", "vllm")


class Report:
    """The results so far: printed as they come, and kept in a file."""

    def __init__(self, folder: Path | None, seconds: float, ours: list[str], suffix: str = ""):
        self._ends = time.monotonic() + seconds
        self.data: dict[str, Any] = {"machine": machine(), "ours": ours, "cases": {}, "step": {}}
        gpu = self.data["machine"]["gpu"].split()[-1].lower()
        self.path = folder / f"{gpu}{suffix}.json" if folder else None
        print(json.dumps(self.data["machine"], indent=1), flush=True)

    @property
    def over(self) -> bool:
        return time.monotonic() > self._ends

    def measure(self, case: Case, contenders: dict[str, Callable]) -> None:
        """Adds the contenders to the case's row."""
        if self.over:
            return
        new = {"kv_bytes": case.kv_bytes, "flops": case.flops, "decode": case.decode}
        row = self.data["cases"].setdefault(case.name, new | {"us": {}, "refused": {}})
        print(f"{case.name}", flush=True)
        case.allocate()
        for name, contender in contenders.items():
            row["us"][name], reason = self._time(contender, case)
            if reason:
                row["refused"][name] = reason
            print(f"  {name:24}{self._cell(case, row['us'][name], reason)}", flush=True)
            self.write()
        case.free()

    def measure_step(self, case: Case, layers: int, steps: dict[str, dict[str, Callable]]) -> None:
        """Adds the time of a layer in a step of many, for each backend and each way to call it."""
        if self.over:
            return
        print(f"{layers} layers of {case.name}, us a layer", flush=True)
        us, refused = {}, {}
        self.data["step"] = {"case": case.name, "layers": layers, "us": us, "refused": refused}
        case.allocate()
        for backend, contenders in steps.items():
            us[backend] = {}
            for how, contender in contenders.items():
                us[backend][how], reason = self._time(contender, case)
                if reason:
                    refused[f"{backend}, {how}"] = reason
                print(f"  {backend:12}{how:20}{reason or f'{us[backend][how]:8.1f}'}", flush=True)
            self.write()
        case.free()

    def miss(self, name: str, reason: str) -> None:
        """Records why a contender was not measured at all."""
        print(f"{name}: {reason}", flush=True)
        self.data["missing"] = {name: reason}
        self.write()

    def _time(self, contender, case) -> tuple[float | None, str | None]:
        if self.over:
            return None, "out of time"
        try:
            return contender(case), None
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            return None, f"{type(error).__name__}: {first[:160]}"

    def _cell(self, case, microseconds, reason) -> str:
        if microseconds is None:
            return f"{'-':>10}  ({reason})"
        about = self.data["machine"]
        if case.decode:
            rate, unit, most = case.kv_bytes / microseconds / 1e6, "TB/s", about["copy_tb_s"]
        else:
            rate, unit, most = case.flops / microseconds / 1e6, "TFLOP/s", about["matmul_tflop_s"]
        return f"{microseconds:10.1f} us {rate:8.2f} {unit:8}{rate / most:5.2f}"

    def write(self) -> None:
        write(self.path, self.data)


def machine() -> dict:
    return {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "heads": f"{HEADS} query heads, {KV_HEADS} KV heads, head_dim {HEAD_DIM}",
        "copy_tb_s": round(copy_bandwidth(), 3),
        "matmul_tflop_s": round(matmul_rate(), 1),
        "versions": versions(PACKAGES),
    }

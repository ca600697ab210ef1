"""What a benchmark ran on, by JAX alone: the device, the versions, and how fast it copies."""

import datetime
import json
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
import jax.numpy as jnp

import pagedattn

PACKAGES = ("jax", "jaxlib", "numba", "torch", "triton")


def machine() -> dict:
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "processor": processor(),
        "date": datetime.date.today().isoformat(),
        "copy_gb_s": round(copy_rate(1 << 30 if device.platform == "gpu" else 1 << 27) / 1e9, 1),
        "versions": {"python": platform.python_version(), "pagedattn": pagedattn.__version__}
        | installed(),
    }


def processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def installed() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def copy_rate(num_bytes: int, calls: int = 10) -> float:
    """Bytes a second of a copy on the device, read and written; the best of some."""
    copy, source = jax.jit(jnp.copy), jnp.zeros(num_bytes, jnp.uint8)
    copy(source).block_until_ready()
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            target = copy(source)
        target.block_until_ready()
        best = min(best, (time.perf_counter() - start) / calls)
    return 2 * num_bytes / best


def caption(about: dict) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return f"{about['device']}, copies {about['copy_gb_s']} GB/s; {about['processor']}; {versions}"


def write(path: Path | None, data: dict) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n")

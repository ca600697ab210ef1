"""What a benchmark ran on, by JAX alone: the device, the versions, and how fast it copies."""

import datetime
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import pagedattn

PACKAGES = ("jax", "jaxlib", "numba", "torch", "triton")


def machine() -> dict:
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "processor": processor(),
        "date": datetime.date.today().isoformat(),
        "copy_gb_s": round(copy_rate(1 << 30 if device.platform == "gpu" else 1 << 26) / 1e9, 1),
        "versions": {"python": platform.python_version(), "pagedattn": pagedattn.__version__}
        | installed(),
    }


def processor() -> str:
    return facts_of_cpu().get("model name", platform.processor())


def facts_of_cpu() -> dict[str, str]:
    """What Linux says of the first CPU, by its names; nothing elsewhere."""
    path, facts = Path("/proc/cpuinfo"), {}
    for line in path.read_text().splitlines() if path.exists() else ():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    return facts


def installed(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def copy_rate(num_bytes: int, calls: int = 10) -> float:
    """Bytes a second of a copy on the device, read and written; the best of some."""
    copy = copies_of(num_bytes)
    jax.block_until_ready(copy())
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(calls):
            target = copy()
        jax.block_until_ready(target)
        best = min(best, (time.perf_counter() - start) / calls)
    return 2 * num_bytes / best


def copies_of(num_bytes: int) -> Callable[[], object]:
    """A function that copies so many bytes on the device."""
    if jax.default_backend() == "cpu":  # to memory that is there: new pages cost more than copies
        source, target = np.zeros((2, num_bytes), np.uint8)
        return lambda: np.copyto(target, source)
    source = jnp.zeros(num_bytes, jnp.uint8)
    return partial(jax.jit(jnp.copy), source)


def caption(about: dict) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return f"{about['device']}, copies {about['copy_gb_s']} GB/s; {about['processor']}; {versions}"


def write(path: Path | None, data: dict) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n")

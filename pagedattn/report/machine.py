"""The machine: versions of packages, devices, driver."""

import platform
import re
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

from .. import __version__
from .._dispatch import registry

PACKAGES = (
    *("jax", "jaxlib", "numpy", "torch", "jax-tvm-ffi", "triton", "xformers"),
    *("intel-extension-for-pytorch", "numba", "flash-attn-4", "hypothesis", "rich"),
)
CPUINFO = Path("/proc/cpuinfo")
DRIVER = Path("/proc/driver/nvidia/version")
# What docs/results has figures of, beside CPUs.
MEASURED = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")


def versions() -> dict[str, str | None]:
    """The version of pagedattn, Python and each package; None where it is not installed."""
    ours = {"pagedattn": __version__, "python": platform.python_version()}
    return ours | {name: installed(name) for name in PACKAGES}


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def devices() -> tuple[str, ...]:
    """JAX's devices, those of a kind together; RuntimeError where JAX can start none.

    >>> devices() != ()
    True
    """
    kinds = Counter(device.device_kind for device in jax.devices())
    return tuple(f"{count} x {kind}" for kind, count in kinds.items())


def unmeasured() -> tuple[str, ...]:
    """The kinds of JAX's devices, but for CPUs, on which nobody has measured the library."""
    kinds = dict.fromkeys(d.device_kind for d in jax.devices() if d.platform != "cpu")
    return tuple(kind for kind in kinds if kind not in MEASURED)


def driver(file: Path = DRIVER) -> str | None:
    """The version of NVIDIA's kernel driver on Linux; None where there is none."""
    found = re.search(r"Kernel Module.*?(\d+(\.\d+)+)", file.read_text()) if file.exists() else None
    return found and found[1]


def processor(file: Path = CPUINFO) -> str:
    """The CPU's name where Linux knows it, and its architecture."""
    text = file.read_text() if file.exists() else ""
    named = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    names = named[1] if named else platform.processor(), platform.machine()
    return ", ".join(dict.fromkeys(filter(None, names)))


def kernel() -> str | None:
    """What of the CPU the compiled kernel may use; None where it cannot be loaded."""
    if not registry.can_load("numba"):
        return None
    from .._kernels.cpu.simd import cpu_features
    from ..backends.numba.support import num_threads

    return f"{cpu_features()}; {num_threads()} threads"

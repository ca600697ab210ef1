"""The machine: versions of packages, devices, driver."""

import platform
import re
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

from .. import __version__

PACKAGES = (
    *("jax", "jaxlib", "numpy", "torch", "jax-tvm-ffi", "triton", "xformers"),
    *("intel-extension-for-pytorch", "numba", "flash-attn-4", "hypothesis", "rich"),
)
DRIVER = Path("/proc/driver/nvidia/version")


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


def driver(file: Path = DRIVER) -> str | None:
    """The version of NVIDIA's kernel driver on Linux; None where there is none."""
    found = re.search(r"Kernel Module.*?(\d+(\.\d+)+)", file.read_text()) if file.exists() else None
    return found and found[1]

"""The import of xFormers' attention: the one place that knows the names of its packages.

xFormers 0.0.35's library is built for CUDA 12 and needs libcudart.so.12. A torch for another CUDA
does not bring that; it is then loaded first, from the package nvidia-cuda-runtime-cu12. After
0.0.35 the attention moves to the package mslk, under the same names.
"""

import contextlib
import ctypes
import functools
import importlib
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, files
from types import ModuleType

import torch

from pagedattn import BackendUnavailableError

ROOTS = ("xformers.ops.fmha", "mslk.attention.fmha")
RUNTIME_PACKAGE, RUNTIME_LIBRARY = "nvidia-cuda-runtime-cu12", "libcudart.so.12"


@functools.cache
def fmha() -> ModuleType:
    """The package with `attn_bias`, `triton_splitk`, `flash` and `cutlass` in it.

    Raises:
      BackendUnavailableError: not installed.
    """
    _load_runtime()
    for root in ROOTS:
        try:
            with hidden_flash_attn():
                return importlib.import_module(root)
        except ModuleNotFoundError as error:
            if error.name != root.partition(".")[0]:
                raise
    raise BackendUnavailableError(
        "xFormers' attention is not installed: pip install --no-deps xformers==0.0.35 "
        f"{RUNTIME_PACKAGE} (its own requirements would replace torch)"
    )


@contextlib.contextmanager
def hidden_flash_attn() -> Iterator[None]:
    """Hides a package `flash_attn` that is not FlashAttention 2.

    xFormers 0.0.35 takes any for that one (ops/fmha/flash.py) and cannot be imported beside
    flash-attn-4, which has the same name.
    """
    try:
        importlib.import_module("flash_attn.flash_attn_interface")
    except ImportError:
        kept = sys.modules.get("flash_attn")
        sys.modules["flash_attn"] = None  # pyright: ignore[reportArgumentType] (Python's own mark)
        try:
            yield
        finally:
            del sys.modules["flash_attn"]
            if kept is not None:
                sys.modules["flash_attn"] = kept
    else:
        yield


def why_unusable() -> list[str]:
    """Why the kernels cannot run here, and what to install."""
    try:
        common = fmha().common
    except BackendUnavailableError as error:
        return [str(error)]
    if getattr(common, "_built_with_cuda", True):
        return []
    return [
        f"xFormers' CUDA library did not load: it needs {RUNTIME_LIBRARY}, which this torch "
        f"(CUDA {torch.version.cuda}) does not bring: pip install {RUNTIME_PACKAGE}"
    ]


def _load_runtime():
    if torch.version.cuda is None or torch.version.cuda.startswith("12."):
        return
    try:
        installed = files(RUNTIME_PACKAGE) or []
    except PackageNotFoundError:
        return
    for file in installed:
        if file.name == RUNTIME_LIBRARY:
            ctypes.CDLL(str(file.locate()), mode=ctypes.RTLD_GLOBAL)

"""The operators of Intel's extension for PyTorch: the one place that imports it."""

import functools
import importlib
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from pagedattn import BackendUnavailableError

PACKAGE = "intel_extension_for_pytorch"
INSTALL = "pip install 'pagedattn[ipex]'"


@functools.cache
def paged_operators() -> Any:
    """The class whose methods are the operators; each runs on the device of its output.

    Raises:
      BackendUnavailableError: not installed, or not for this torch.
    """
    if reasons := why_unusable():
        raise BackendUnavailableError("; ".join(reasons))
    return importlib.import_module(f"{PACKAGE}.llm.modules").PagedAttention


def why_unusable() -> list[str]:
    """Why the extension cannot be imported, and what to install."""
    if find_spec(PACKAGE) is None:
        return [f"{PACKAGE} is not installed: {INSTALL}"]
    # Beside another torch its import fails by an AttributeError (a slip: os.exit for os._exit).
    try:
        ours, its = version("torch"), version(PACKAGE)
    except PackageNotFoundError as error:
        return [f"no version of {error.name} is known, and the two must match: {INSTALL}"]
    if _release(ours) != _release(its):
        return [f"{PACKAGE} {its} needs torch {_release(its)}, not {ours}: {INSTALL}"]
    return []


def _release(text: str) -> str:
    return ".".join(text.split(".")[:2])

"""The import of flash-attn-4: the one place that knows the names of its package.

Its public functions take no memory for their results, so it is the function beneath them that is
called; a test on a GPU watches that it stays.
"""

import functools
import importlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from pagedattn import BackendUnavailableError

PACKAGE = "flash-attn-4"
INSTALL = "pip install 'pagedattn[flash]'"


def why_unusable() -> list[str]:
    """Why the package cannot be used here, and what to install."""
    try:
        version(PACKAGE)
    except PackageNotFoundError:
        return [f"{PACKAGE} is not installed: {INSTALL}"]
    return []


@functools.cache
def forward() -> Callable:
    """The function that launches the kernels; importing it takes seconds.

    Raises:
      BackendUnavailableError: not installed, or another package's flash_attn is found in its place.
    """
    if reasons := why_unusable():
        raise BackendUnavailableError("; ".join(reasons))
    try:
        return importlib.import_module("flash_attn.cute.interface")._flash_attn_fwd
    except (ImportError, AttributeError) as error:
        raise BackendUnavailableError(
            f"{PACKAGE} {version(PACKAGE)} cannot be used: {error}"
        ) from error

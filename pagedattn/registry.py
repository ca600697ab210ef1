"""The backends for JAX arrays by name, each loaded when it is first needed."""

import functools
from importlib.metadata import EntryPoint, entry_points

import jax

from .backend import Backend
from .checks import is_traced
from .errors import BackendUnavailableError

ENTRY_POINT_GROUP = "pagedattn.backends"
XLA = EntryPoint("xla", "pagedattn.backends.xla:BACKEND", ENTRY_POINT_GROUP)

# In which order `backend=None` tries them; what else is registered runs when named.
ORDER = {
    "gpu": ("cudnn", "triton", "xformers", "sdpa", "xla"),
    "cpu": ("sdpa", "ipex", "xla"),
}


@functools.cache
def registered() -> dict[str, EntryPoint]:
    """Every known backend, whether it can be loaded or not."""
    return {entry.name: entry for entry in (*entry_points(group=ENTRY_POINT_GROUP), XLA)}


@functools.cache
def load(name: str) -> Backend:
    """The backend of a name; BackendUnavailableError if unknown or lacking a package."""
    if name not in registered():
        raise BackendUnavailableError(
            f"backend must be one of {sorted(registered())}, got {name!r}; others register through "
            f"the entry-point group {ENTRY_POINT_GROUP!r}"
        )
    try:
        return registered()[name].load()
    except ImportError as error:
        raise BackendUnavailableError(f"backend {name!r} is not available: {error}") from error


def order_on(platform: str) -> list[str]:
    """The names that `backend=None` tries on a platform."""
    return [name for name in ORDER.get(platform, ("xla",)) if name in registered()]


def platform_of(array) -> str:
    """Where an array lies, or where a traced one will by default: "cpu", "gpu", ..."""
    if is_traced(array):
        device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
        return getattr(device, "platform", device) or jax.default_backend()
    return next(iter(array.devices())).platform


def can_load(name: str) -> bool:
    try:
        load(name)
    except BackendUnavailableError:
        return False
    return True

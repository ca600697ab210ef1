"""The registry of backends for JAX arrays, and the documented order of choice."""

import functools
from importlib.metadata import EntryPoint, entry_points

import jax

from . import backend as backends
from . import validate
from .backend import Backend
from .backends import xla
from .checks import is_traced
from .errors import BackendUnavailableError
from .spec import AttentionSpec

ENTRY_POINT_GROUP = "pagedattn.backends"

# `backend=None` takes the first usable of its platform; what else is registered runs when named.
ORDER = {
    "gpu": ("triton", "xformers", "sdpa", "xla"),
    "cpu": ("sdpa", "ipex", "xla"),
}


def select(backend: str | None, call: tuple) -> Backend:
    """The backend that runs a call `(query, cache, batch, spec, return_lse)`.

    An explicit name never falls back; None takes the first usable by `ORDER`.
    """
    if backend is not None:
        return backends.require(load, backend, call)
    order = ORDER.get(platform(call[0]), ("xla",))
    return backends.choose(load, (name for name in order if name in registered()), call)


def explain(query, cache, batch, spec=AttentionSpec(), *, return_lse=False) -> dict[str, list[str]]:
    """Why each registered backend can or cannot run a call: an empty list means it can.

    Raises:
      InvalidInputError: no backend could, since the arguments do not fit together.

    >>> from pagedattn import init_kv_cache, make_batch
    >>> cache, batch = init_kv_cache(1, 4, 1, 8), make_batch([1], [0], [[0]], block_size=4)
    >>> explain(jax.numpy.ones((1, 2, 8), cache.dtype), cache, batch)["xla"]
    []
    """
    validate.attention(query, cache, batch, spec)
    call = (query, cache, batch, spec, return_lse)
    return {name: backends.why_not(load, name, call) for name in registered()}


def available_backends() -> tuple[str, ...]:
    """The names of the backends whose packages are installed.

    >>> "xla" in available_backends()
    True
    """
    return tuple(name for name in registered() if _loads(name))


@functools.cache
def load(name: str) -> Backend:
    """The backend of a name; BackendUnavailableError if unknown or lacking a package."""
    if name not in registered():
        raise BackendUnavailableError(
            f"backend must be one of {sorted(registered())}, got {name!r}; others register through "
            f"the entry-point group {ENTRY_POINT_GROUP!r}"
        )
    source = registered()[name]
    if isinstance(source, Backend):
        return source
    try:
        return source.load()
    except ImportError as error:
        raise BackendUnavailableError(f"backend {name!r} is not available: {error}") from error


@functools.cache
def registered() -> dict[str, Backend | EntryPoint]:
    """Every known backend, loaded or not."""
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    return {**found, "xla": xla.BACKEND}


def platform(array) -> str:
    """Where an array lies, or where a traced one will by default: "cpu", "gpu", ..."""
    if is_traced(array):
        device = jax.config.read("jax_default_device")
        return getattr(device, "platform", device) or jax.default_backend()
    return next(iter(array.devices())).platform


def _loads(name) -> bool:
    try:
        load(name)
    except BackendUnavailableError:
        return False
    return True

"""All backends by name, for JAX arrays and for torch tensors, each loaded when it is first needed.

Built-in ones stand in one table, in the order in which `backend=None` tries them. Others register
by entry points of the group `pagedattn.backends` (or `pagedattn_torch.backends` for tensors), which
name a `Backend`; its field `before` may give it a place in that order.
"""

import functools
import importlib
from enum import StrEnum
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

from ..errors import BackendUnavailableError
from .backend import Backend


class Framework(StrEnum):
    """Whose arrays a backend takes; the value is the entry-point group of third parties."""

    JAX = "pagedattn.backends"
    TORCH = "pagedattn_torch.backends"


class BuiltIn(NamedTuple):
    """Where a backend is for each framework.

    Fields:
      jax, torch: the module that has it for this framework's arrays; None: there is none.
      devices: the kinds of device that it runs on; empty: all.
      extra: the extra that installs what it needs, as in `pagedattn[extra]`; empty: it needs none.
    """

    jax: str | None = None
    torch: str | None = None
    devices: tuple[str, ...] = ()
    extra: str = ""


ACROSS = "pagedattn_interop.backends"  # makes a backend for torch tensors one for JAX arrays
ON_CUDA = ("cuda",)
BUILT_IN = {
    "mosaic": BuiltIn("pagedattn.backends.mosaic", None, ON_CUDA),
    "cudnn": BuiltIn("pagedattn.backends.cudnn", None, ON_CUDA),
    "flash": BuiltIn(ACROSS, "pagedattn_torch.backends.flash", ON_CUDA, "flash"),
    "triton": BuiltIn(
        "pagedattn.backends.triton", "pagedattn_torch.backends.triton", ON_CUDA, "cuda"
    ),
    "xformers": BuiltIn(ACROSS, "pagedattn_torch.backends.xformers", ON_CUDA, "torch"),
    "numba": BuiltIn("pagedattn.backends.numba", "pagedattn_torch.backends.numba", ("cpu",), "cpu"),
    "ipex": BuiltIn(ACROSS, "pagedattn_torch.backends.ipex", ("cpu", "xpu"), "ipex"),
    "sdpa": BuiltIn(ACROSS, "pagedattn_torch.backends.sdpa", extra="torch"),
    "xla": BuiltIn("pagedattn.backends.xla"),
}

OWN_TORCH = ("flash", "ipex")  # extras that install the torch that they need
PACKAGE_OF = {"llvmlite": "numba", "jax_tvm_ffi": "jax-tvm-ffi"}  # where a module is another's


def names(framework: Framework) -> tuple[str, ...]:
    """Every backend known for a framework, whether it can be loaded or not."""
    return (*_built_in(framework), *_third_parties(framework))


def order(framework: Framework) -> tuple[str, ...]:
    """The names that `backend=None` tries, in turn."""
    names = list(_built_in(framework))
    for name in _third_parties(framework):
        before = load(name, framework).before if can_load(name, framework) else None
        if before in names:
            names.insert(names.index(before), name)
    return tuple(names)


def wrong_device(name: str, device: str) -> list[str]:
    """Why a built-in backend cannot run on a kind of device, without loading it."""
    devices = BUILT_IN[name].devices if name in BUILT_IN else ()
    if not devices or device in devices:
        return []
    return [f"{name} runs on {' and '.join(devices)}, the query lies on {device}"]


def load(name: str, framework: Framework = Framework.JAX) -> Backend:
    """The backend of a name; BackendUnavailableError if it is unknown or lacks a package."""
    found = tried(name, framework)
    if isinstance(found, Backend):
        return found
    raise BackendUnavailableError(found)


@functools.cache
def tried(name: str, framework: Framework) -> Backend | str:
    """The backend of a name, or why there is none: what failed once is not imported again."""
    try:
        return installed(record(name, framework))
    except BackendUnavailableError as error:
        return str(error)


def record(name: str, framework: Framework) -> Backend:
    """The backend of a name, whether the packages it runs on are installed or not.

    Raises:
      BackendUnavailableError: it is unknown, or what its module imports is missing.
    """
    if name in _built_in(framework):
        return _of_built_in(name, framework)
    if name in _third_parties(framework):
        return _of_third_party(_third_parties(framework)[name])
    raise BackendUnavailableError(
        f"backend must be one of {sorted(names(framework))}, got {name!r}; others register "
        f"through the entry-point group {framework.value!r}"
    )


def installed(backend: Backend) -> Backend:
    """The backend; BackendUnavailableError if it lacks a package."""
    if reasons := backend.missing():
        text = f"backend {backend.name!r} is not available: {'; '.join(reasons)}"
        raise BackendUnavailableError(text)
    return backend


def available_backends() -> tuple[str, ...]:
    """The names of the backends for JAX arrays whose packages are installed.

    >>> "xla" in available_backends()
    True
    """
    return tuple(name for name in names(Framework.JAX) if can_load(name))


def can_load(name: str, framework: Framework = Framework.JAX) -> bool:
    return isinstance(tried(name, framework), Backend)


def _lacks(error: ImportError) -> str:
    """The package that is not installed, where this is why; else what the import raised."""
    why = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    if isinstance(why, ModuleNotFoundError) and why.name and "." not in why.name:
        return f"{PACKAGE_OF.get(why.name, why.name)} is not installed"
    return str(why)


def _cure(name) -> str:
    extra = BUILT_IN[name].extra
    return f": pip install 'pagedattn[{extra}]'" if extra else ""


def _of_built_in(name, framework) -> Backend:
    module = getattr(BUILT_IN[name], framework.name.lower())
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        if isinstance(error, BackendUnavailableError) and BUILT_IN[name].extra not in OWN_TORCH:
            raise
        text = f"backend {name!r} is not available: {_lacks(error)}{_cure(name)}"
        raise BackendUnavailableError(text) from error
    return found.bridged(load(name, Framework.TORCH)) if module == ACROSS else found.BACKEND


def _of_third_party(entry) -> Backend:
    try:
        backend = entry.load()
    except Exception as error:  # a foreign module can raise anything, and the others still work
        text = f"backend {entry.name!r} is not available: {entry.value} raised {error!r}"
        raise BackendUnavailableError(text) from error
    if not isinstance(backend, Backend):
        text = f"backend {entry.name!r} is not available: {entry.value} is no pagedattn.Backend"
        raise BackendUnavailableError(text)
    return backend


@functools.cache
def _built_in(framework) -> tuple[str, ...]:
    return tuple(n for n, where in BUILT_IN.items() if getattr(where, framework.name.lower()))


@functools.cache
def _third_parties(framework) -> dict[str, EntryPoint]:
    entries = entry_points(group=framework.value)
    return {entry.name: entry for entry in entries if entry.name not in BUILT_IN}

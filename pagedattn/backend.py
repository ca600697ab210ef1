"""What a backend is, and how one is chosen."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .errors import BackendUnavailableError, UnsupportedError


@dataclass(frozen=True)
class Backend:
    """One way to compute paged attention.

    `unsupported(query, cache, batch, spec, return_lse)` lists the reasons why it cannot honour a
    call (empty: it can), from shapes, dtypes, devices and the spec only; arrays may be traced.
    `run(query, cache, batch, spec, return_lse)` returns `(out, lse)`; lse may be None unless
    `return_lse`. Both are given validated arguments.
    `set_rows(array, indices, rows)`, if there is one, returns the array with rows set in place,
    leaving out indices out of range, for where XLA itself cannot.
    `unfit`, called like `unsupported`, lists the reasons why another backend is likely faster:
    `backend=None` then passes this one over.
    """

    name: str
    unsupported: Callable[..., list[str]]
    run: Callable[..., tuple[Any, Any]]
    set_rows: Callable[..., Any] | None = None
    unfit: Callable[..., list[str]] | None = None


def choose(load: Callable[[str], Backend], names: Iterable[str], call: tuple) -> Backend:
    """The first backend of `names` that is fit to run the call; UnsupportedError with reasons."""
    refusals = []
    for name in names:
        reasons = why_not(load, name, call)
        if not reasons and (unfit := load(name).unfit) is not None:
            reasons = unfit(*call)
        if not reasons:
            return load(name)
        refusals.append(f"{name}: {'; '.join(reasons)}")
    raise UnsupportedError("no backend can run this call: " + " | ".join(refusals))


def require(load: Callable[[str], Backend], name: str, call: tuple) -> Backend:
    """The named backend and no other.

    Raises:
      BackendUnavailableError: unknown, or a package is missing.
      UnsupportedError: it cannot honour the call.
    """
    backend = load(name)
    if reasons := backend.unsupported(*call):
        raise UnsupportedError(f"backend {name!r} cannot run this call: {'; '.join(reasons)}")
    return backend


def why_not(load: Callable[[str], Backend], name: str, call: tuple) -> list[str]:
    """The reasons why a backend cannot run a call, a missing package included."""
    try:
        return load(name).unsupported(*call)
    except BackendUnavailableError as error:
        return [str(error)]

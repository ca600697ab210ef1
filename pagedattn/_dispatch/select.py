"""Which backend runs a call, and why."""

from dataclasses import replace

from .._arrays.inspect import shown
from ..errors import BackendUnavailableError, InvalidInputError, UnsupportedError
from . import registry
from .backend import Backend
from .call import Call
from .crossings import Crossings, require_crossings
from .registry import Framework, load


def select(name: str | Backend | Crossings | None, call: Call, framework: Framework) -> Backend:
    """The backend that runs a call: the named one and no other, or the first that is fit.

    Raises:
      InvalidInputError: it is neither a name nor a Backend nor Crossings nor None.
      BackendUnavailableError: it is unknown, or a package is missing.
      UnsupportedError: it cannot run the call, or none can; the text has the reasons.
    """
    if name is None:
        return _first_fit(call, framework)
    if isinstance(name, Crossings):
        return _first_fit(replace(call, crossings=name), framework)
    if not isinstance(name, str | Backend):
        raise InvalidInputError(
            f"backend must be a name, a Backend, Crossings or None, got {shown(name)}"
        )
    backend = _named(name, call, framework)
    _require_none(backend.why_not(call), backend.name)
    return backend


def _named(name, call, framework) -> Backend:
    _require_none(registry.wrong_device(str(name), call.device), str(name))
    return registry.installed(name) if isinstance(name, Backend) else load(name, framework)


def _require_none(reasons, name) -> None:
    if reasons:
        raise UnsupportedError(f"backend {name!r} cannot run this call: {'; '.join(reasons)}")


def _first_fit(call, framework) -> Backend:
    refusals = []
    for name in registry.order(framework):
        reasons = why_not(name, call, framework)
        if not reasons and not (reasons := _why_passed_over(name, call, framework)):
            return load(name, framework)
        refusals.append(f"{name}: {'; '.join(reasons)}")
    raise UnsupportedError("no backend can run this call: " + " | ".join(refusals))


def _why_passed_over(name, call, framework) -> list[str]:
    """Sizes, which say what is faster, do not decide where decode and prompt must be one kernel."""
    return [] if call.batch_invariant else load(name, framework).why_passed_over(call)


def why_not(backend: str | Backend, call: Call, framework: Framework) -> list[str]:
    """The reasons why a backend cannot run a call, a missing package included."""
    if reasons := registry.wrong_device(str(backend), call.device):
        return reasons
    if isinstance(backend, Backend):
        return backend.missing() or backend.why_not(call)
    try:
        return load(backend, framework).why_not(call)
    except BackendUnavailableError as error:
        return [str(error)]


class Explanation(dict[str, list[str]]):
    """Why each backend cannot run a call; an empty list of reasons means that it can.

    Fields:
      choice: the name that `backend=None` takes; None if no backend can run the call.
      passed_over: for each backend that could run the call and comes before `choice`, why
        `backend=None` does not take it.
    """

    def __init__(
        self,
        reasons: dict[str, list[str]],
        choice: str | None,
        passed_over: dict[str, list[str]],
    ) -> None:
        super().__init__(reasons)
        self.choice: str | None = choice
        self.passed_over: dict[str, list[str]] = passed_over


def explain(call: Call, framework: Framework, crossings: Crossings = Crossings()) -> Explanation:
    """What every backend says to a call, and which is taken by these crossings."""
    require_crossings(crossings)
    call = replace(call, crossings=crossings)
    reasons = {name: why_not(name, call, framework) for name in registry.names(framework)}
    usable = [name for name in registry.order(framework) if not reasons[name]]
    slower_because = {name: _why_passed_over(name, call, framework) for name in usable}
    choice = next((name for name in usable if not slower_because[name]), None)
    before = usable[: usable.index(choice)] if choice else usable
    return Explanation(reasons, choice, {name: slower_because[name] for name in before})

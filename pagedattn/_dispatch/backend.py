"""What a backend is."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, runtime_checkable

from .._arrays.checks import flag
from .._arrays.inspect import shown
from ..batch.metadata import Sequences, nondecreasing_starts
from ..errors import InvalidInputError
from .call import Call
from .options import AROUND

# The end of the reason for refusing an option that a backend knows nothing of.
LACKS = "does not have it"
_NOT_ASKED = {field.name: field.default for field in fields(Call)}


@runtime_checkable
class Plan(Protocol):
    """What a backend works out once a step: `plan(call, batch)`, handed to `run` of all layers."""

    def __call__(self, call: Call, batch: Sequences, /) -> Any: ...


@runtime_checkable
class Run(Protocol):
    """How a backend computes a call: `run(call, query, cache, plan, **arrays)`.

    query `[num_tokens, num_heads, head_dim]`, cache a `KVCache`, plan what the backend's `plan`
    gave, arrays those of the options that it supports and the call brings. Returns out, of
    `call.out_shape` in the query's dtype, and lse, float32 of `call.lse_shape`; lse may be None
    unless `call.return_lse`.
    """

    def __call__(
        self, call: Call, query: Any, cache: Any, plan: Any, /, *args: Any, **arrays: Any
    ) -> tuple[Any, Any]: ...


def _nothing(*_) -> list[str]:
    return []


def _require_kind(name, value, kind):
    expected = getattr(kind, "__name__", str(kind))
    text = f"a Backend's {name} must be {expected}, got {shown(value)}"
    if not isinstance(value, kind):
        raise InvalidInputError(text)


def _nondecreasing_starts(call: Call, batch: Sequences) -> Sequences:
    return nondecreasing_starts(batch)


@dataclass(frozen=True)
class Backend:
    """One way to compute paged attention, on JAX arrays or on torch tensors.

    Fields:
      name: how callers ask for it.
      supports: the options it knows, by the names of `AttentionSpec`'s fields and of the keywords
        of `paged_attention`; "causal" is also to attend without causality. A call that asks for
        any other is refused before anything here runs, unless the library can do it around the
        backend, by what the backend does support.
        With `scales`, `run` is given the cache with its `key_scale` and `value_scale`; without,
        queries and results are multiplied by them around it, float16 ones as float32.
      run: `run(call, query, cache, plan)` gives `(out, lse)`, as `Run` says. Options that are
        arrays are keyword arguments: only those that it supports, and that the call
        brings. Arguments are validated, and the call is not empty.
      refusals: `refusals(call)` lists the reasons why it cannot run a call; none means it can.
      slower_because: `slower_because(call)` lists the reasons why another backend is likely faster:
        `backend=None` then passes this one over.
      plan: `plan(call, batch)` computes what depends on the batch but not on a layer's values;
        `run` gets it in place of the batch, and all layers of a step share it. By default it is
        the batch, with starts that never fall.
      missing: `missing()` lists the packages that it needs and that are not installed, each with
        the command that installs it.
      before: the built-in backend that this one precedes when `backend=None` chooses. A backend
        of a third party that names none runs only when it is named.
      takes_out: whether `run` takes the keyword `out`: memory for the results, out and lse (None
        unless `call.return_lse`), which it may fill and return in place of memory of its own.
      plans_any: whether `plan` takes arrays of any framework. For a torch backend that JAX calls,
        XLA then computes it, once for all layers of a program.

    Raises:
      InvalidInputError: a field is of another kind.

    >>> def run(call, query, cache, batch):
    ...     return query, None  # attention that nobody would want
    >>> mine = Backend("mine", supports=frozenset({"scale"}), run=run)
    >>> str(mine), "alibi_slopes" in mine.supports
    ('mine', False)
    """

    name: str
    supports: frozenset[str]
    run: Run
    refusals: Callable[[Call], list[str]] = _nothing
    slower_because: Callable[[Call], list[str]] = _nothing
    plan: Plan = _nondecreasing_starts
    missing: Callable[[], list[str]] = _nothing
    before: str | None = None
    takes_out: bool = False
    plans_any: bool = False

    def __post_init__(self) -> None:
        _require_kind("name", self.name, str)
        _require_kind("supports", self.supports, frozenset)
        _require_kind("before", self.before, str | None)
        for name in ("run", "refusals", "slower_because", "plan", "missing"):
            _require_kind(name, getattr(self, name), Callable)
        flag("takes_out", self.takes_out)
        flag("plans_any", self.plans_any)

    def __str__(self) -> str:
        return self.name

    def why_not(self, call: Call) -> list[str]:
        """The reasons why it cannot run a call, options that it does not know first of all."""
        if call.batch_invariant and call.parents:
            return ["batch_invariant: the keys of draft trees are not in the order of positions"]
        if call.selection is not None and call.parents:
            return ["selection: draft trees are not tried with chosen blocks"]
        unknown = [option for option in call.set_options if self.lacks(option)]
        if unknown:
            return [f"{option}: {self.name} {LACKS}" for option in unknown]
        return self.refusals(self.native_call(call))

    def why_passed_over(self, call: Call) -> list[str]:
        """The reasons why another backend is likely faster for a call that it can run."""
        return self.slower_because(self.native_call(call))

    def native_call(self, call: Call) -> Call:
        """The call as it comes to `run`: without what is done around it."""
        for name, around in AROUND.items():
            if around.fact and getattr(call, around.fact) and name not in self.supports:
                changes = dict(around.changes)
                if name in _NOT_ASKED:
                    changes[name] = _NOT_ASKED[name]
                changes["dtype"] = around.dtypes.get(call.dtype, call.dtype)
                call = replace(call, **changes)
        return call

    def lacks(self, option: str) -> bool:
        """Whether neither it supports an option nor the library can do it around it."""
        if option in self.supports:
            return False
        around = AROUND.get(option)
        return around is None or (around.needs is not None and around.needs not in self.supports)

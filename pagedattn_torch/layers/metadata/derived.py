"""Fields that are given, or else follow from those that are."""

import dataclasses
from typing import Any


def derived(cls):
    """A dataclass whose fields read as derived from those given, and may be given any time.

    What is assigned is given from then on. Whatever followed is derived anew: not at once, since
    whoever assigns several fields may contradict the old ones in between, but at the next look at
    any field. `cls._derive(given)` makes all fields of those given.
    """
    for field in dataclasses.fields(cls):
        setattr(cls, field.name, _Derived(field.name))
    return cls


def all_of(owner) -> dict[str, Any]:
    """All fields of an object, by name."""
    state = vars(owner)
    if state["_fields"] is None:
        state["_fields"] = owner._derive(state["_given"])
    return state["_fields"]


def held(owner) -> dict[Any, Any]:
    """What was prepared from the fields, for whoever prepared it; gone when a field is assigned."""
    return vars(owner).setdefault("_held", {})


class _Derived:
    """One such field."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, owner, cls=None) -> Any:
        return self if owner is None else all_of(owner)[self.name]

    def __set__(self, owner, value):
        state = vars(owner)
        state["_given"] = {**state.get("_given", {}), self.name: value}
        state["_fields"] = None
        state["_held"] = {}

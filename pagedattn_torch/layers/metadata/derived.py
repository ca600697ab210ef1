"""Dataclass fields that are either given or derived from those that are."""

import dataclasses
from typing import Any


def derived(cls):
    """A class decorator: fields of the dataclass that are not given are derived from the others.

    Assigning a field is giving it, at any time. The others are then derived anew when any field is
    read next. Not at once: someone who assigns several fields may pass through a contradiction.
    `cls._derive(given)` returns all fields, by name, for a dict of those given.
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
    """A dict for things prepared from the fields; emptied when a field is assigned."""
    return vars(owner).setdefault("_held", {})


class _Derived:
    """The descriptor of such a field."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, owner, cls=None) -> Any:
        return self if owner is None else all_of(owner)[self.name]

    def __set__(self, owner, value):
        state = vars(owner)
        state["_given"] = {**state.get("_given", {}), self.name: value}
        state["_fields"] = None
        state["_held"] = {}

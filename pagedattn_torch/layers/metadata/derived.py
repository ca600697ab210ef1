"""Dataclass fields that are either given or derived from those that are."""

import dataclasses
from typing import Any

import numpy as np
from torch import Tensor

from .contents import watch


def derived(cls):
    """A class decorator: fields of the dataclass that are not given are derived from the others.

    Assigning a field is giving it, at any time. The others are then derived anew when any field is
    read next. Not at once: someone who assigns several fields may pass through a contradiction.
    To change what a field holds, in place, is giving it, too, but only `refresh` notices.
    `cls._derive(given)` returns all fields, by name, for a dict of those given.
    """
    for field in dataclasses.fields(cls):
        setattr(cls, field.name, _Derived(field.name))
    cls.__getstate__ = _state_to_copy
    return cls


def all_of(owner) -> dict[str, Any]:
    """All fields of an object, by name."""
    state = vars(owner)
    if state.get("_fields") is None:
        given = state["_given"]
        fields = owner._derive(given)
        seen = _seen(given, fields)
        state |= {"_fields": fields, "_held": {}, "_seen": [each for each in seen if each[2]]}
        state["_all_seen"] = len(state["_seen"]) == len(seen)
    return state["_fields"]


def held(owner) -> dict[Any, Any]:
    """A dict for things prepared from the fields; emptied when a field is given anew."""
    all_of(owner)
    return vars(owner)["_held"]


def refresh(owner) -> None:
    """Notices which fields were changed in place.

    To be called before anything is prepared from the fields, or what was prepared is used.
    """
    all_of(owner)
    _give(owner, _changed(owner))


def notices_changes(owner) -> bool:
    """Whether `refresh` notices every change in place."""
    all_of(owner)
    return vars(owner)["_all_seen"]


def _changed(owner) -> dict[str, Any]:
    """The fields that were changed in place since the others were derived."""
    state = vars(owner)
    if state.get("_fields") is None:
        return {}
    return {name: value for name, value, changed in state["_seen"] if changed()}


def _seen(given, fields) -> list[tuple]:
    """What may be changed in place: its field, its value, and what tells whether it was changed."""
    arrays = Tensor | np.ndarray
    held = [(n, v) for n, v in fields.items() if isinstance(v, list | arrays)]
    held += [(n, v) for n, v in given.items() if isinstance(v, arrays) and v is not fields.get(n)]
    return [(name, value, watch(value)) for name, value in held]


def _give(owner, values):
    if values:
        given = {**vars(owner).get("_given", {}), **values}
        vars(owner).update({"_given": given, "_fields": None, "_held": {}})


def _state_to_copy(owner) -> dict[str, Any]:
    """Without what was derived or prepared: a copy makes its own."""
    _give(owner, _changed(owner))
    return {n: v for n, v in vars(owner).items() if n not in _NOT_COPIED}


_NOT_COPIED = ("_fields", "_held", "_seen", "_all_seen")


class _Derived:
    """The descriptor of such a field."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, owner, cls=None) -> Any:
        return self if owner is None else all_of(owner)[self.name]

    def __set__(self, owner, value):
        numbers = isinstance(value, list) and not any(isinstance(item, Tensor) for item in value)
        _give(owner, _changed(owner) | {self.name: [*value] if numbers else value})

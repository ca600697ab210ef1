"""A fuzzer of the public API: good calls, of which some arguments are replaced by hostile values.

Each call ends well or in an error of ours, and one that fails leaves its arguments as they were,
byte for byte.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from hostile_values import hostile

from pagedattn import PagedAttentionError

Call = Callable[[], tuple[Callable, dict[str, Any]]]  # makes a function and its good arguments


class Failure(NamedTuple):
    """A call that ended in somebody else's exception, or that changed what it was given."""

    call: str
    seed: int
    replaced: dict[str, str]
    error: str

    def __str__(self):
        changes = ", ".join(f"{name}={value}" for name, value in self.replaced.items())
        return f"{self.call}({changes}) [seed {self.seed}]: {self.error}"


def fuzz(calls: Mapping[str, Call], seeds) -> list[Failure]:
    """One hostile call a seed, over all of the calls in turn."""
    names = list(calls)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcomes = [attempt(names[seed % len(names)], calls, seed) for seed in seeds]
    return [failure for failure in outcomes if failure is not None]


def attempt(name: str, calls: Mapping[str, Call], seed: int) -> Failure | None:
    rng = np.random.default_rng(seed)
    function, arguments = calls[name]()
    replaced = {}
    count = min(int(rng.choice([1, 1, 1, 2, 3])), len(arguments))
    for argument in rng.permutation(list(arguments))[:count].tolist():
        place, value = replace(rng, argument, arguments[argument])
        arguments[argument] = value
        replaced[place] = describe(value)
    if rng.random() < 0.1:
        argument = rng.choice(list(arguments))
        replaced[argument] = "a tracer"
        error = traced(function, arguments, argument)
    else:
        error = ended(function, arguments)
    return error and Failure(name, seed, replaced, error)


def replace(rng, argument, good) -> tuple[str, Any]:
    """A hostile value in place of an argument, or of one field of a record."""
    if dataclasses.is_dataclass(good) and not isinstance(good, type) and rng.random() < 0.7:
        fields = [field.name for field in dataclasses.fields(good)]
        field = fields[int(rng.integers(len(fields)))]
        value = hostile(rng, getattr(good, field))
        try:
            return f"{argument}.{field}", dataclasses.replace(good, **{field: value})
        except Exception:  # a record that checks itself; the fuzzer makes it too
            return f"{argument}.{field}", good
    return argument, hostile(rng, good)


def ended(function, arguments) -> str | None:
    """What is wrong with the end of a call, if anything."""
    before = snapshot(arguments)
    try:
        function(**arguments)
    except PagedAttentionError:
        changed = [name for name in before if snapshot(arguments)[name] != before[name]]
        return f"it failed, but changed {changed}" if changed else None
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:150]}"
    return None


def traced(function, arguments, argument) -> str | None:
    """The same with one argument traced: its value, or a number where that is no array."""
    found = []

    def call(value):
        found.append(ended(function, {**arguments, argument: value}))
        return 0

    try:
        jax.jit(call)(arguments[argument])
    except Exception:
        found.clear()
        jax.jit(call)(1)
    return found[-1]


def snapshot(arguments) -> dict[str, list[bytes]]:
    return {name: [*map(content, jax.tree.leaves(value))] for name, value in arguments.items()}


def content(leaf) -> bytes:
    if (
        isinstance(leaf, torch.Tensor)
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
    ):
        return leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    if isinstance(leaf, np.ndarray) or (concrete and not leaf.is_deleted()):
        return b"" if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended) else bytes_of(leaf)
    return b""


def bytes_of(array) -> bytes:
    array = np.asarray(array)
    return repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()


def describe(value) -> str:
    try:
        if hasattr(value, "dtype"):
            return f"{type(value).__module__} {value.dtype}{list(value.shape)}"
        return repr(value)[:80]
    except Exception:
        return type(value).__name__

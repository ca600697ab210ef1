"""The pieces of all input checks. They raise InvalidInputError, and read only known values."""

import operator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ..errors import InvalidInputError
from .inspect import describe, is_integer, read, shown, wide
from .memory import require_dense, require_memory
from .typing import TorchTensor

MAX_SLOTS = np.iinfo(np.int32).max


def is_count(value, least=1) -> bool:
    """Whether the value is an integer from `least` to the last of int32."""
    if type(value) is int:
        return least <= value <= MAX_SLOTS
    number = whole(value)
    return number is not None and least <= number <= MAX_SLOTS


def whole(value: Any) -> int | None:
    """The value as an int, an array's too; None of others. Truth values and time spans are none."""
    kind = str(getattr(value, "dtype", type(value).__name__))
    try:
        require_memory("a number", value)
        return None if "bool" in kind or "timedelta" in kind else operator.index(value)
    except Exception:  # whatever a foreign object raises
        return None


def static(name, value) -> None:
    """Requires a value that is known when a program is traced."""
    if isinstance(value, Tracer):
        raise InvalidInputError(
            f"{name} must be known when the program is traced: name it in static_argnames of "
            "jax.jit"
        )


def count(name, value, least=1) -> int:
    """The value as an int, which must be an integer of at least `least`."""
    if type(value) is int and least <= value <= MAX_SLOTS:
        return value
    static(name, value)
    if not is_count(value, least):
        least_text = f"above {least - 1}" if least else "of at least 0"
        raise InvalidInputError(f"{name} must be an integer {least_text}, got {shown(value)}")
    return operator.index(value)


def flag(name, value) -> None:
    """Requires True or False: whether an array is true may be unknown, or ambiguous."""
    if type(value) is bool:
        return
    static(name, value)
    if not isinstance(value, bool):
        raise InvalidInputError(f"{name} must be True or False, got {shown(value)}")


def integers(name, values, ndim) -> np.ndarray:
    """A list, or an array whose values are known, as int64 of `ndim` dimensions."""
    _not_masked(name, values)
    array = array_of(name, values)
    if not (is_integer(array.dtype) and array.ndim == ndim):
        raise InvalidInputError(
            f"{name} must be integers of {ndim} dimension(s), got {describe(array)}"
        )
    return wide(array)


def array_of(name, values) -> np.ndarray:
    """A list, or an array whose values are known, as a NumPy array; of integers if it is empty."""
    array = read(name, values)
    no_values = array.size == 0 and array.dtype.kind == "f"  # what NumPy makes of an empty list
    return array.astype(np.int64) if no_values else array


def of_list(name, values):
    """A list or a tuple as a NumPy array; other values, records among them, unchanged."""
    return array_of(name, values) if type(values) in (list, tuple) else values


def start_locs(name, starts, count, longest):
    """Requires starts that rise from 0 to at most `count`, by steps of at most `longest`.

    Zeros at the end are padding, and not looked at.
    """
    used = starts[1:].nonzero()[0]
    starts = starts[: used[-1] + 2 if used.size else 1]
    spans = starts[1:] - starts[:-1]
    if not (starts[0] == 0 and (spans >= 0).all() and starts[-1] <= count):
        raise InvalidInputError(
            f"{name} must rise from 0 to at most {count}, got {starts.tolist()}"
        )
    if not spans.max(initial=0) <= longest:
        raise InvalidInputError(
            f"the longest span of {name} is {spans.max(initial=0)}, above its static bound "
            f"{longest}"
        )


def an_array(name, array) -> None:
    """Requires an array: JAX's, traced or not, NumPy's, or any other with DLPack."""
    if isinstance(array, Tracer):
        return
    if isinstance(array, TorchTensor):
        require_dense(name, array)
    elif not isinstance(array, jax.Array):
        _other_array(name, array)
    elif array.is_deleted():
        raise InvalidInputError(
            f"{name} has been given away (donated to a jitted function) or deleted"
        )


def _other_array(name, array) -> None:
    foreign = hasattr(array, "__dlpack__") and not isinstance(array, type)
    shaped = hasattr(array, "dtype") and hasattr(array, "shape") and hasattr(array, "ndim")
    if not isinstance(array, np.ndarray | np.generic) and not (foreign and shaped):
        raise InvalidInputError(f"{name} must be an array, got {type(array).__name__}")
    _not_masked(name, array)


def known_sizes(name, array) -> None:
    """Refuses the symbolic sizes of jax.export: what is computed depends on sizes."""
    if isinstance(array, Tracer) and not all(isinstance(size, int) for size in array.shape):
        raise InvalidInputError(
            f"{name} must have sizes that are known when the program is traced, got "
            f"{describe(array)}: pad to a few sizes, and export a program for each"
        )


def packed(name, array) -> None:
    """Refuses a batch of equally long rows: its tokens come one after another."""
    if array.ndim == 4:
        raise InvalidInputError(
            f"{name} must be packed, [num_tokens, heads, dim], got {describe(array)}: "
            f"{name}.reshape(-1, *{name}.shape[2:]) is, where every sequence has as many tokens"
        )


def int_array(name, array, ndim):
    """Requires an array of integers of `ndim` dimensions, of sizes that are known."""
    if isinstance(array, TorchTensor):  # as `an_array`: of the five of a batch one call less each
        require_dense(name, array)
    else:
        an_array(name, array)
    if array.ndim != ndim or not is_integer(array.dtype):
        raise InvalidInputError(
            f"{name} must be integers of {ndim} dimension(s), got {describe(array)}"
        )


def ids(name, ids, bound, what, or_none=""):
    bad = ids[(ids < 0) | (ids >= bound)]
    if bad.size:
        raise InvalidInputError(
            f"{name} must name {what} from 0 to {bound - 1}{or_none}, got {bad[:8].tolist()}"
        )


def distinct_slots(slots) -> None:
    """No two tokens of a batch may be written to one slot: which one won would be chance."""
    found, counts = np.unique(slots[slots >= 0], return_counts=True)
    if not (counts <= 1).all():
        raise InvalidInputError(
            f"slots {found[counts > 1].tolist()} are written by several tokens; sequences may "
            "share only blocks that this step does not write: copy the block first, or, if the "
            "tokens are written already, give make_batch their key_lens"
        )


def _not_masked(name, array) -> None:
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidInputError(f"{name} must be an array without a mask: fill it first")

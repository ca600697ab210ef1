"""The pieces of all input checks. They raise InvalidInputError, and read only known values."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .errors import InvalidInputError

MAX_SLOTS = np.iinfo(np.int32).max


def require(condition, text: str) -> None:
    if not condition:
        raise InvalidInputError(text)


def is_count(value, least=1) -> bool:
    """Whether the value is an integer from `least` to the last of int32."""
    number = whole(value)
    return number is not None and least <= number <= MAX_SLOTS


def whole(value: Any) -> int | None:
    """The value as an int, an array's too; None of others. Truth values and time spans are none."""
    kind = str(getattr(value, "dtype", type(value).__name__))
    try:
        return None if "bool" in kind or "timedelta" in kind else operator.index(value)
    except Exception:  # whatever a foreign object raises
        return None


def static(name, value) -> None:
    """Requires a value that is known when a program is traced."""
    require(
        not is_traced(value),
        f"{name} must be known when the program is traced: name it in static_argnames of jax.jit",
    )


def count(name, value, least=1) -> int:
    """The value as an int, which must be an integer of at least `least`."""
    static(name, value)
    least_text = f"above {least - 1}" if least else "of at least 0"
    require(is_count(value, least), f"{name} must be an integer {least_text}, got {shown(value)}")
    return operator.index(value)


def flag(name, value) -> None:
    """Requires True or False: whether an array is true may be unknown, or ambiguous."""
    require(isinstance(value, bool), f"{name} must be True or False, got {shown(value)}")


def integers(name, values, ndim) -> np.ndarray:
    """A list, or an array whose values are known, as int64 of `ndim` dimensions."""
    _not_masked(name, values)
    array = array_of(name, values)
    require(
        is_integer(array.dtype) and array.ndim == ndim,
        f"{name} must be integers of {ndim} dimension(s), got {describe(array)}",
    )
    return _wide(array)


def array_of(name, values) -> np.ndarray:
    """A list, or an array whose values are known, as a NumPy array; of integers if it is empty."""
    array = _read(name, values)
    no_values = array.size == 0 and array.dtype.kind == "f"  # what NumPy makes of an empty list
    return array.astype(np.int64) if no_values else array


def of_list(name, values):
    """A list or a tuple as a NumPy array; other values, records among them, unchanged."""
    return array_of(name, values) if type(values) in (list, tuple) else values


def start_locs(name, starts, count, longest):
    """Requires starts that rise from 0 to at most `count`, by steps of at most `longest`.

    Zeros at the end are padding, and not looked at.
    """
    starts = np.append(starts[:1], np.trim_zeros(starts[1:], "b"))
    spans = np.diff(starts)
    require(
        starts[0] == 0 and (spans >= 0).all() and starts[-1] <= count,
        f"{name} must rise from 0 to at most {count}, got {starts.tolist()}",
    )
    require(
        spans.max(initial=0) <= longest,
        f"the longest span of {name} is {spans.max(initial=0)}, above its static bound {longest}",
    )


def an_array(name, array) -> None:
    """Requires an array: JAX's, traced or not, NumPy's, or any other with DLPack."""
    if is_traced(array):
        return
    known_kinds = isinstance(array, jax.Array | np.ndarray | np.generic)
    foreign = hasattr(array, "__dlpack__") and not isinstance(array, type)
    shaped = hasattr(array, "dtype") and hasattr(array, "shape") and hasattr(array, "ndim")
    require(
        known_kinds or (foreign and shaped), f"{name} must be an array, got {type(array).__name__}"
    )
    _not_masked(name, array)
    deleted = isinstance(array, jax.Array) and array.is_deleted()
    require(not deleted, f"{name} has been given away (donated to a jitted function) or deleted")


def known_sizes(name, array) -> None:
    """Refuses the symbolic sizes of jax.export: what is computed depends on sizes."""
    require(
        not is_traced(array) or all(isinstance(size, int) for size in array.shape),
        f"{name} must have sizes that are known when the program is traced, got {describe(array)}: "
        "pad to a few sizes, and export a program for each",
    )


def int_array(name, array, ndim):
    an_array(name, array)
    require(
        array.ndim == ndim and is_integer(array.dtype),
        f"{name} must be integers of {ndim} dimension(s), got {describe(array)}",
    )


def ids(name, ids, bound, what, or_none=""):
    bad = ids[(ids < 0) | (ids >= bound)]
    require(
        not bad.size,
        f"{name} must name {what} from 0 to {bound - 1}{or_none}, got {bad[:8].tolist()}",
    )


def distinct_slots(slots) -> None:
    """No two tokens of a batch may be written to one slot: which one won would be chance."""
    found, counts = np.unique(slots[slots >= 0], return_counts=True)
    require(
        (counts <= 1).all(),
        f"slots {found[counts > 1].tolist()} are written by several tokens; sequences may share "
        "only blocks that this step does not write: copy the block first, or, if the tokens are "
        "written already, give make_batch their key_lens",
    )


def is_floating(dtype) -> bool:
    """Whether JAX has this floating dtype; NumPy's long double is one that it has not."""
    dtype = dtype_of(dtype)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 8


def is_integer(dtype) -> bool:
    """Whether it is an integer dtype of eight bits or more: JAX promotes no smaller ones."""
    dtype = dtype_of(dtype)
    return dtype is not None and dtype.kind in "iu"


def dtype_name(dtype) -> str:
    """The name of a NumPy, JAX or torch dtype, alike for all of them."""
    return str(dtype).removeprefix("torch.")


def dtype_of(dtype) -> np.dtype | None:
    """A NumPy, JAX or torch dtype as NumPy's, torch's by its name; None if NumPy has none."""
    if dtype is None or isinstance(dtype, jax.Array | np.ndarray | np.generic):
        return None  # NumPy would take float64, and an array's own
    try:
        return jnp.dtype(dtype_name(dtype) if "torch" in str(dtype) else dtype)
    except (TypeError, ValueError):
        return None


def describe(array) -> str:
    return f"{array.dtype}{list(array.shape)}"


def shown(value) -> str:
    """A value for an error's text; of an array only dtype and shape: its values may be unknown."""
    return describe(value) if isinstance(value, jax.Array | np.ndarray) else repr(value)


def known(array) -> np.ndarray | None:
    """The values of an array; None while it is traced, or where a torch tensor is not on the CPU.

    Reading a tensor from a GPU would wait for it, and is an error in a CUDA graph.
    """
    on_device = hasattr(array, "new_tensor") and array.device.type != "cpu"
    if is_traced(array) or on_device:
        return None
    # NumPy reads no tensor that requires gradients.
    values = _read("an array", array.detach() if hasattr(array, "new_tensor") else array)
    return _wide(values) if is_integer(values.dtype) else values


def is_traced(array) -> bool:
    """Whether the array is inside jit, grad, vmap or scan, where it has no value yet."""
    return isinstance(array, Tracer)


def _read(name, values) -> np.ndarray:
    """Values as a NumPy array. Whatever reading a foreign object raises is the caller's error."""
    try:
        return np.asarray(values)
    except jax.errors.TracerArrayConversionError:
        raise InvalidInputError(
            f"{name} must be known on the host, but JAX traces it: make batches before the jitted "
            "function, or inside it with batch_from_pool; jnp.stack makes an array of a list"
        ) from None
    except Exception as error:
        raise InvalidInputError(
            f"{name} must be an array or a list of one dtype, but the values of this "
            f"{type(values).__name__} cannot be read: {error}"
        ) from error


def _wide(array) -> np.ndarray:
    """Integers as int64: arithmetic in a narrow or unsigned dtype would wrap."""
    if array.dtype == np.uint64:
        array = np.minimum(array, np.uint64(np.iinfo(np.int64).max))
    return array.astype(np.int64)


def _not_masked(name, array) -> None:
    require(
        not isinstance(array, np.ma.MaskedArray),
        f"{name} must be an array without a mask: fill it first",
    )

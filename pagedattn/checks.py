"""The pieces that input checks are made of. Values are looked at only where they are known."""

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .errors import InvalidInputError

MAX_SLOTS = np.iinfo(np.int32).max


def require(condition, text: str) -> None:
    if not condition:
        raise InvalidInputError(text)


def is_count(value, least=1) -> bool:
    counts = hasattr(value, "__index__") and not isinstance(value, bool)
    return counts and value.__index__() >= least


def integers(name, values, ndim) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise InvalidInputError(
            f"{name} must be integers of {ndim} dimension(s): {error}"
        ) from error
    array = array.astype(np.int64) if array.size == 0 else array
    require(
        array.dtype.kind in "iu" and array.ndim == ndim,
        f"{name} must be integers of {ndim} dimension(s), got {describe(array)}",
    )
    return array.astype(np.int64)


def start_locs(name, starts, count, longest):
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
    require(
        hasattr(array, "dtype") and hasattr(array, "ndim"),
        f"{name} must be an array, got {type(array).__name__}",
    )


def int_array(name, array, ndim):
    an_array(name, array)
    require(
        array.ndim == ndim and jnp.issubdtype(_numpy_dtype(array.dtype), jnp.integer),
        f"{name} must be integers of {ndim} dimension(s), got {describe(array)}",
    )


def ids(name, ids, bound, what):
    bad = ids[(ids < 0) | (ids >= bound)]
    require(not bad.size, f"{name} must name {what} from 0 to {bound - 1}, got {bad[:8].tolist()}")


def distinct_slots(slots) -> None:
    """No two tokens of a batch may be written to one slot: which one won would be chance."""
    found, counts = np.unique(slots[slots >= 0], return_counts=True)
    require(
        (counts <= 1).all(),
        f"slots {found[counts > 1].tolist()} are written by several tokens; sequences may share "
        "only blocks that this step does not write, copy the block first",
    )


def is_floating(dtype) -> bool:
    return jnp.issubdtype(_numpy_dtype(dtype), jnp.floating)


def _numpy_dtype(dtype) -> np.dtype:
    """The dtype of a NumPy, JAX or torch array; torch's has no NumPy form but its name."""
    try:
        return jnp.dtype(str(dtype).removeprefix("torch.") if "torch" in str(dtype) else dtype)
    except TypeError as error:
        raise InvalidInputError(f"expected a dtype, got {dtype!r}") from error


def describe(array) -> str:
    return f"{array.dtype}{list(array.shape)}"


def known(array) -> np.ndarray | None:
    """The values of an array; None while it is traced, or where a torch tensor is not on the CPU.

    Reading a tensor from a GPU would wait for it, and is an error in a CUDA graph.
    """
    on_device = hasattr(array, "new_tensor") and array.device.type != "cpu"
    if is_traced(array) or on_device:
        return None
    values = np.asarray(array)
    # Arithmetic in a narrow or unsigned dtype would wrap.
    return values.astype(np.int64) if values.dtype.kind in "iu" else values


def is_traced(array) -> bool:
    """Whether the array is inside jit, grad, vmap or scan, where it has no value yet."""
    return isinstance(array, Tracer)

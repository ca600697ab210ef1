"""What an array or a dtype is: facts that checks ask for, and others too."""

import dataclasses
import functools
from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..errors import InvalidInputError
from .memory import require_memory
from .typing import TorchTensor, is_torch


@functools.cache
def is_floating(dtype: Hashable) -> bool:
    """Whether JAX has this floating dtype; NumPy's long double is one that it has not."""
    dtype = dtype_of(dtype)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 8


@functools.cache
def is_computed(dtype: Hashable) -> bool:
    """Whether it is a floating dtype of 16 bits or more: of fewer bits are caches with scales."""
    dtype = dtype_of(dtype)
    return dtype is not None and is_floating(dtype) and dtype.itemsize > 1


@functools.cache
def is_integer(dtype: Hashable) -> bool:
    """Whether it is an integer dtype of eight bits or more: JAX promotes no smaller ones."""
    dtype = dtype_of(dtype)
    return dtype is not None and dtype.kind in "iu"


@functools.cache
def dtype_name(dtype: Hashable) -> str:
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
    if getattr(array, "is_nested", False):  # torch gives no shape of most of these
        return f"{array.dtype} nested"
    return f"{array.dtype}{list(array.shape)}"


def shown(value) -> str:
    """A value for an error's text; of arrays only dtype and shape: their values may be unknown."""
    if is_array(value):
        return describe(value)
    if type(value) is list:
        return f"[{', '.join(map(shown, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(shown, value))}{',' * (len(value) == 1)})"
    if type(value) is dict:
        return f"{{{', '.join(f'{key!r}: {shown(item)}' for key, item in value.items())}}}"
    return type(value).__name__ if _holds_arrays(value) else repr(value)


def _holds_arrays(value) -> bool:
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return False
    return any(is_array(getattr(value, field.name, None)) for field in dataclasses.fields(value))


def is_array(value) -> bool:
    return isinstance(value, jax.Array | np.ndarray) or is_torch(value)


def known(array) -> np.ndarray | None:
    """The values of an array; None while it is traced, or where a torch tensor is not on the CPU.

    Reading a tensor from a GPU would wait for it, and is an error in a CUDA graph.
    """
    if isinstance(array, Tracer):
        return None
    if isinstance(array, jax.Array):
        values = np.asarray(array)
    elif not isinstance(array, TorchTensor):
        values = read("an array", array)
    elif array.device.type == "cpu":
        values = read("an array", array.detach())  # NumPy reads none that requires gradients
    else:
        return None
    return wide(values) if values.dtype.kind in "iu" else values


def read(name, values) -> np.ndarray:
    """Values as a NumPy array. Whatever reading a foreign object raises is the caller's error."""
    require_memory(name, values)
    try:
        return np.asarray(values)
    except jax.errors.TracerArrayConversionError:
        raise InvalidInputError(
            f"{name} must be known on the host, but JAX traces it: make batches before the jitted "
            "function, or inside it with next_batch; jnp.stack makes an array of a list"
        ) from None
    except Exception as error:
        raise InvalidInputError(
            f"{name} must be an array or a list of one dtype, but the values of this "
            f"{type(values).__name__} cannot be read: {error}"
        ) from error


def wide(array) -> np.ndarray:
    """Integers as int64: arithmetic in a narrow or unsigned dtype would wrap."""
    if array.dtype == np.uint64:
        array = np.minimum(array, np.uint64(np.iinfo(np.int64).max))
    return array.astype(np.int64)

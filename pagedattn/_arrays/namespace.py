"""Functions that arrays of NumPy, JAX and torch do not spell alike."""

import sys
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Integer, Shaped

from .typing import TorchTensor, is_torch


def cdiv(count, size):
    """`count / size`, rounded up; for integers and for arrays of any framework.

    >>> cdiv(17, 16)
    2
    """
    return -(-count // size)


def namespace(array) -> ModuleType:
    """The module whose functions take an array: torch, numpy (for plain numbers too) or jax.numpy.

    >>> namespace(np.arange(3)) is np
    True
    """
    if isinstance(array, TorchTensor):
        return sys.modules["torch"]  # loaded already, since a tensor exists
    return np if isinstance(array, np.ndarray | np.generic | int | float) else jnp


def wide_dtype(array):
    """The dtype in which floats are computed: float64 for float64, else float32.

    By itself, since JAX told to promote strictly (jax_numpy_dtype_promotion) promotes no halves.

    >>> wide_dtype(np.ones(3, np.float16))
    <class 'numpy.float32'>
    """
    xp = namespace(array)
    return xp.float64 if array.dtype == xp.float64 else xp.float32


def as_dtype(array, dtype):
    """An array of any framework in a dtype. It stays on its device, whatever torch's default is."""
    if is_torch(array):
        return array.to(dtype)  # torch.asarray would move it
    return namespace(array).asarray(array, dtype=dtype)


def arange(count: int, like: Shaped[Any, "..."]) -> Int[Any, "{count}"]:
    """0, 1, ..., count - 1 as int32, in the framework and on the device of the array `like`.

    >>> arange(3, np.zeros(1))
    array([0, 1, 2], dtype=int32)
    """
    on_device = {"device": like.device} if is_torch(like) else {}
    return namespace(like).arange(count, dtype=namespace(like).int32, **on_device)


def take_along(
    array: Shaped[Any, "*#n length"], indices: Integer[Any, "*#n count"]
) -> Shaped[Any, "*#n count"]:
    """Elements along the last axis, at indices whose other axes broadcast with the array's.

    >>> take_along(np.array([[5, 6], [7, 8]]), np.array([[1, 1, 0]])).tolist()
    [[6, 6, 5], [8, 8, 7]]
    """
    if is_torch(array):
        return namespace(array).take_along_dim(array, indices.long(), -1)
    return namespace(array).take_along_axis(array, indices, -1)


def in_range(ids: Integer[Any, "*n"], bound: int) -> Bool[Any, "*n"]:
    """True where an id may index an axis of length `bound`."""
    return (ids >= 0) & (ids < bound)


def set_at(array: Array, indices: Int[Array, "*n"], values, *, unique_indices=False) -> Array:
    """Writes rows; a negative index, or one past the end, writes nothing.

    Without wrap_negative_indices=False JAX would write -1 to the last row, even in drop mode.
    """
    return array.at[indices].set(
        values, mode="drop", wrap_negative_indices=False, unique_indices=unique_indices
    )


def add_at(array: Array, indices: Int[Array, "*n"], value) -> Array:
    """Adds to rows; a negative index, or one past the end, adds nothing."""
    return array.at[indices].add(value, mode="drop", wrap_negative_indices=False)

"""Integers of any dtype as int32, the one that block tables, slots and lengths have."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Integer

from .checks import int_array, known, require

INT32 = np.iinfo(np.int32)


def int32_array(name: str, array: Integer[Any, "..."] | int, ndim: int) -> Int[Array, "..."]:
    """An argument as int32. Outside jit what does not fit is an error, inside it becomes -1.

    Raises:
      InvalidInputError: no array, or one of another rank, of no integers, or of too large ones.
    """
    if isinstance(array, int):
        array = np.asarray(array)  # a number stands for an array without dimensions
    int_array(name, array, ndim)
    if isinstance(array, jax.Array) and array.dtype == np.int32:
        return array
    values = known(array)
    if values is None:
        require(
            isinstance(array, jax.Array),
            f"{name} lies on a device: pagedattn_interop.to_jax shares it",
        )
        return int32(array)
    large = values[(values < INT32.min) | (values > INT32.max)]
    require(not large.size, f"{name} must fit int32, got {large[:8].tolist()}")
    return int32(values)


def int32(values: Integer[Any, "*n"]) -> Int[Array, "*n"]:
    """Integers of any dtype as int32; what does not fit becomes -1, which is out of every range."""
    # jnp.asarray would cut NumPy's 64 bits down to 32 before anybody could look.
    values = values if isinstance(values, jax.Array) else np.asarray(values)
    if values.dtype == np.int32:
        return jnp.asarray(values)
    narrow = values.astype(np.int32)
    fits = (narrow.astype(values.dtype) == values) & ((narrow < 0) == (values < 0))
    return jnp.where(fits, jnp.asarray(narrow), -1)


def rising(starts: Integer[Any, "n"]) -> Int[Array, "n"]:
    """Starts of sequences as int32, none before the one that precedes it.

    Batches are also padded with zeros behind their last sequence: those become its end.

    >>> rising(jnp.array([0, 3, 4, 0, 0])).tolist()
    [0, 3, 4, 4, 4]
    """
    return jax.lax.cummax(int32(starts))

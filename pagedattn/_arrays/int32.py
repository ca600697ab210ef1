"""Integers of any dtype as int32, the one that block tables, slots and lengths have."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Integer

from ..errors import InvalidInputError
from .checks import int_array, of_list
from .inspect import known, read
from .typing import is_torch

INT32 = np.iinfo(np.int32)


def int32_array(
    name: str, array: Integer[Any, "..."] | Sequence[int] | int, ndim: int
) -> Int[Array, "..."]:
    """An argument as int32. A value beyond int32 is an error outside jit, and becomes -1 inside.

    Raises:
      InvalidInputError: not an array of integers, another rank than `ndim`, or too large values.
    """
    if isinstance(array, int):
        array = np.asarray(array)  # a number stands for an array without dimensions
    array = of_list(name, array)
    int_array(name, array, ndim)
    if isinstance(array, jax.Array) and array.dtype == np.int32:
        return array
    values = known(array)
    if values is None:
        if not isinstance(array, jax.Array):
            raise InvalidInputError(f"{name} lies on a device: pagedattn_interop.to_jax shares it")
        return int32(array)
    large = values[(values < INT32.min) | (values > INT32.max)]
    if large.size:
        raise InvalidInputError(f"{name} must fit int32, got {large[:8].tolist()}")
    return int32(values)


def int32(values: Integer[Any, "*n"]) -> Int[Array, "*n"]:
    """Integers of any dtype as int32; what does not fit becomes -1, which is out of every range."""
    # jnp.asarray would cut 64 bits of NumPy's to 32, and the check below would see no difference.
    values = values if isinstance(values, jax.Array) else read("integers", values)
    if values.dtype == np.int32:
        return values if isinstance(values, jax.Array) else jnp.asarray(values)
    narrow = values.astype(np.int32)
    fits = (narrow.astype(values.dtype) == values) & ((narrow < 0) == (values < 0))
    return jnp.where(fits, jnp.asarray(narrow), -1)


def nondecreasing(starts: Integer[Any, "n"]) -> Integer[Any, "n"]:
    """Starts of sequences as int32 that never fall; torch's keep their dtype.

    Zeros that pad the starts behind the last sequence become the end of that sequence.

    >>> nondecreasing(jnp.array([0, 3, 4, 0, 0])).tolist()
    [0, 3, 4, 4, 4]
    """
    if is_torch(starts):
        return starts.cummax(0).values
    return jax.lax.cummax(int32(starts))

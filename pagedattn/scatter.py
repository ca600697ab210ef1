"""Setting rows of an array in place, also where XLA alone would rewrite the whole array."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Integer, Shaped

from ._arrays.devices import device_of
from ._arrays.int32 import int32
from ._arrays.namespace import in_range, set_at
from ._dispatch.registry import Framework, can_load, load, order, wrong_device
from .errors import UnsupportedError

WIDENED = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # what XLA:CPU computes in a wider dtype


def set_rows(
    array: Shaped[Any, "*shape"], indices: Integer[Any, "n"], rows: Shaped[Any, "n *row"]
) -> Shaped[Array, "*shape"]:
    """Sets rows of an array, leaving out those whose index is out of range.

    An index counts rows over all leading axes together: in a plane of the cache it is the number
    of a slot, or of a block, depending on the shape of a row.

    Works in place inside a jit that donates the array, with one exception: XLA:CPU computes
    bfloat16 in float32, and float8 in float16, so to set one row it rewrites the whole array,
    however large (jax-ml/jax#40101 is of that kind). There `Backend.set_rows` of some backend runs
    instead, if one is installed that has it and takes the dtype.
    """
    array, indices, rows = jnp.asarray(array), int32(indices), jnp.asarray(rows)
    if array.dtype.name in WIDENED and isinstance(array, Tracer) and device_of(array) == "cpu":
        for setter in _setters():
            with contextlib.suppress(UnsupportedError):  # the next one may take the dtype
                return _differentiable(setter)(array, indices, rows)
    return _scatter(array, indices, rows)


def _setters():
    names = (name for name in order(Framework.JAX) if not wrong_device(name, "cpu"))
    backends = (load(name) for name in names if can_load(name))
    return (backend.set_rows for backend in backends if backend.set_rows is not None)


def _scatter(array, indices, rows):
    flat = array.reshape(-1, *rows.shape[1:])
    # unique_indices promises distinct indices: each row to drop gets a negative one of its own.
    nowhere = -1 - jnp.arange(len(indices), dtype=jnp.int32)
    indices = jnp.where(in_range(indices, len(flat)), indices, nowhere)
    return set_at(flat, indices, rows, unique_indices=True).reshape(array.shape)


def _differentiable(setter):
    @jax.custom_jvp
    def call(array, indices, rows):
        return setter(array, indices, rows)

    @call.defjvp
    def tangent(primals, tangents):
        array, indices, rows = primals
        d_array, _, d_rows = tangents
        return call(array, indices, rows), _scatter(d_array, indices, d_rows)

    return call

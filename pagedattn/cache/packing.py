"""Numbers of four bits, two a byte in memory. For arrays of any framework.

Byte c of a row holds column c in its low four bits and column c + head_dim // 2 in its high ones,
in two's complement: the halves of a row are unpacked without interleaving.
"""

import functools
import math
from collections.abc import Hashable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Integer, UInt8

from .._arrays.inspect import dtype_of
from .._arrays.namespace import as_dtype, namespace

# The dtypes that are held two a byte, by the largest number that each holds.
PACKED = {"int4": 7.0}
GROUP = 32  # columns that share a scale


@functools.cache
def name_of(dtype: Hashable) -> str:
    """The name of a dtype of any framework; of none where NumPy has none."""
    return getattr(dtype_of(dtype), "name", "")


@functools.cache
def is_packed(plane_dtype: Hashable) -> bool:
    """Whether planes of a dtype hold two numbers a byte: uint8 is nothing else.

    >>> is_packed(jnp.uint8), is_packed(jnp.int8)
    (True, False)
    """
    return dtype_of(plane_dtype) == "uint8"


def columns(plane) -> int:
    """The columns of a plane: its last axis, or twice that."""
    return plane.shape[-1] * (2 if is_packed(plane.dtype) else 1)


@functools.cache
def meant_dtype(plane_dtype: Hashable) -> Any:
    """The dtype of the numbers that planes of a dtype hold.

    >>> str(meant_dtype(jnp.uint8)), meant_dtype("int8")
    ('int4', 'int8')
    """
    return jnp.dtype("int4") if is_packed(plane_dtype) else plane_dtype


def held_dtype(dtype) -> Any:
    """The dtype of the planes of a cache of a dtype.

    >>> held_dtype("int4"), held_dtype("int8")
    ('uint8', 'int8')
    """
    return "uint8" if name_of(dtype) in PACKED else dtype


def held_shape(shape: tuple[int, ...], dtype) -> tuple[int, ...]:
    """The shape of a plane of a cache of a dtype, from its shape in columns."""
    return (*shape[:-1], shape[-1] // 2) if name_of(dtype) in PACKED else shape


def group_of(head_dim: int) -> int:
    """Columns that share a scale: 32, or the most that divide both 32 and head_dim.

    >>> group_of(128), group_of(80), group_of(24)
    (32, 16, 8)
    """
    return math.gcd(head_dim, GROUP)


def packed(rows: Integer[Any, "*rows head_dim"]) -> UInt8[Any, "*rows head_dim//2"]:
    """Integers from -8 to 7 as bytes.

    >>> packed(jnp.array([[1, -1]], jnp.int8)).tolist()
    [[241]]
    """
    half = rows.shape[-1] // 2
    bits = as_dtype(rows, namespace(rows).uint8) & 15
    return bits[..., :half] | (bits[..., half:] << 4)


def unpacked(rows: UInt8[Any, "*rows bytes"]) -> Integer[Any, "*rows 2*bytes"]:
    """The inverse of `packed`, as int8.

    >>> unpacked(jnp.array([[241]], jnp.uint8)).tolist()
    [[1, -1]]
    """
    xp = namespace(rows)
    bits = as_dtype(xp.concatenate([rows & 15, rows >> 4], -1), xp.int8)
    return (bits ^ 8) - 8

"""Caches in eight bits: what they hold stands for `held * scale`. For arrays of any framework."""

from typing import Any

from jaxtyping import Float, Shaped

from .facts import dtype_of
from .ragged import as_dtype, namespace, wide_dtype

# The largest value of each dtype; what lies beyond is written as it.
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}


def largest(dtype) -> float | None:
    """The largest value that a cache of a dtype holds; None if it is not quantised.

    >>> largest("int8"), largest("bfloat16")
    (127.0, None)
    """
    return LARGEST.get(getattr(dtype_of(dtype), "name", ""))


def quantised(
    rows: Float[Any, "*rows num_kv_heads head_dim"], dtype, scale: Float[Any, "*heads"] | None
) -> Shaped[Any, "*rows num_kv_heads head_dim"]:
    """Keys or values as a cache of a dtype holds them: divided by the scale, rounded, saturating.

    To the nearest, ties to even. What is beyond the largest value, infinity too, becomes it; NaN
    stays NaN, or becomes 0 in int8. Rows for a cache that is not quantised stay as they are.

    >>> import jax.numpy as jnp
    >>> quantised(jnp.array([[0.7, -1e9]]), jnp.int8, jnp.float32(0.5)).tolist()
    [[1, -127]]
    """
    bound = largest(dtype)
    if bound is None:
        return rows
    xp = namespace(rows)
    wide = as_dtype(rows, xp.float32)
    if scale is not None:
        wide = wide / as_dtype(scale, xp.float32).reshape(*[1] * (rows.ndim - 2), -1, 1)
    wide = xp.clip(wide, -bound, bound)
    if dtype_of(dtype) == "int8":
        wide = xp.round(xp.nan_to_num(wide))
    return as_dtype(wide, dtype)


def scaled(
    rows: Float[Any, "num_tokens num_heads head_dim"],
    scale: Float[Any, "*heads"] | None,
    num_kv_heads: int,
) -> Float[Any, "num_tokens num_heads head_dim"]:
    """Rows of query heads times the scale of their KV head."""
    if scale is None:
        return rows
    num_tokens, num_heads, head_dim = rows.shape
    wide = wide_dtype(rows)
    grouped = rows.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    product = as_dtype(grouped, wide) * as_dtype(scale, wide).reshape(1, -1, 1, 1)
    return as_dtype(product, rows.dtype).reshape(rows.shape)

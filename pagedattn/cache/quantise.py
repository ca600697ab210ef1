"""Caches in eight bits: what they hold stands for `held * scale`. For arrays of any framework."""

import functools
import operator
from collections.abc import Hashable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from .._arrays.inspect import dtype_of
from .._arrays.namespace import as_dtype, namespace, wide_dtype

# The largest value of each dtype; what lies beyond is written as it.
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}


@functools.cache
def largest(dtype: Hashable) -> float | None:
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

    >>> quantised(jnp.array([[0.7, -1e9]]), jnp.int8, jnp.float32(0.5)).tolist()
    [[1, -127]]
    """
    bound = largest(dtype)
    if bound is None:
        return rows
    xp = namespace(rows)
    wide = as_dtype(rows, xp.float32)
    if scale is not None:
        divide = _divided if xp is jnp else operator.truediv
        wide = divide(wide, as_dtype(scale, xp.float32).reshape(*[1] * (rows.ndim - 2), -1, 1))
    wide = xp.clip(wide, -bound, bound)
    if dtype_of(dtype) == "int8":
        wide = xp.round(xp.nan_to_num(wide))
    return as_dtype(wide, dtype)


@jax.jit
def _divided(rows: Float[Array, "*rows"], scale: Float[Array, "*ones"]) -> Float[Array, "*rows"]:
    """float32 that eight bits round as they round the float32 quotient of rows and a scale above 0.

    XLA multiplies by 1 / scale where a scale is broadcast, and on GPUs it divides approximately:
    a quotient near a tie may come to lie on its other side. Every tie of eight bits has at most
    eight significant ones. So the quotient is rounded to those, and what remains is exact in
    float32, in whichever order it is computed: products have at most 24 bits.
    """
    unit = _floats((255 << 23) - (_bits(scale) & 0x7F800000))  # a power of two
    rows, scale = rows * unit, scale * unit  # 2 <= scale < 4: what remains is no subnormal number
    size = abs(rows)
    near = lax.reduce_precision(jnp.clip(size / scale, 0, _BEYOND), 8, 7)
    high = _floats(_bits(scale) & -256)
    rest = (size - near * high) - near * (scale - high)
    above, below = _floats(_bits(near) + 1), _floats(jnp.maximum(_bits(near) - 1, 0))
    up = rest > (above - near) * (0.5 * scale)  # float32 rounds all between to `near`
    down = rest < (below - near) * (0.5 * scale)
    beside = _bits(near) + jnp.where(up, _A_QUARTER, 0) - jnp.where(down, _A_QUARTER, 0)
    return jnp.copysign(_floats(beside), rows)


_bits = partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
_floats = partial(lax.bitcast_convert_type, new_dtype=jnp.float32)
_BEYOND = 2.0**16  # above the largest of all dtypes
_A_QUARTER = 1 << 14  # of the step between numbers of eight bits: float16 holds it too


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


def held(cache, rows: Iterable[Any]) -> list[Any]:
    """New keys and values as a cache holds them, one for each of its planes.

    >>> from types import SimpleNamespace as Cache
    >>> cache = Cache(planes=[0], dtype="int8", key_scale=jnp.float32(2), value_scale=None)
    >>> [plane.tolist() for plane in held(cache, [jnp.array([[4.0]]), None])]
    [[[2]]]
    """
    scales = cache.key_scale, cache.value_scale
    of_planes = zip(cache.planes, rows, scales, strict=False)
    return [quantised(new, cache.dtype, scale) for _, new, scale in of_planes]


def scale_of_values(cache) -> Any:
    """Those of a latent cache are columns of its keys."""
    return cache.key_scale if cache.value is None else cache.value_scale

"""Quantised caches: what they hold stands for `held * scale`. For arrays of any framework.

A scale is that of all, of each KV head, or of each token and KV head, which a write computes; in
four bits of each group of columns of these.
"""

import functools
import operator
from collections.abc import Hashable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from .._arrays.namespace import as_dtype, namespace, wide_dtype
from .packing import PACKED, group_of, is_packed, name_of, packed, unpacked

# The largest value of each dtype of eight bits; what lies beyond is written as it.
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
# The least and the largest scale of tokens. Subnormal numbers, which some devices take for 0, are 0
# in all dtypes when they are divided by the least of float32.
BOUNDS = {"float32": (2.0**-100, 2.0**127), "float16": (2.0**-14, 65504.0)}


@functools.cache
def largest(dtype: Hashable) -> float | None:
    """The largest value that a cache of a dtype holds; None if it is not quantised.

    >>> largest("int8"), largest("bfloat16")
    (127.0, None)
    """
    return (LARGEST | PACKED).get(name_of(dtype))


def quantised(
    rows: Float[Any, "*rows num_kv_heads head_dim"], dtype, scale: Float[Any, "*scale"] | None
) -> Shaped[Any, "*rows num_kv_heads held_dim"]:
    """Keys or values as a cache of a dtype holds them: divided by the scale, rounded, saturating.

    To the nearest, ties to even. What is beyond the largest value, infinity too, becomes it; NaN
    stays NaN, or becomes 0 in integers. Rows for a cache that is not quantised stay as they are.

    >>> quantised(jnp.array([[0.7, -1e9]]), jnp.int8, jnp.float32(0.5)).tolist()
    [[1, -127]]
    """
    bound = largest(dtype)
    if bound is None:
        return rows
    xp, name = namespace(rows), name_of(dtype)
    wide = as_dtype(rows, xp.float32)
    if xp is jnp:  # a cotangent would be rounded to the cache's dtype, and no other dtype has one
        wide = jax.lax.stop_gradient(wide)
    if scale is not None:
        divide = _divided if xp is jnp else operator.truediv
        wide = divide(wide, _of_columns(as_dtype(scale, xp.float32), wide.shape))
    wide = xp.clip(wide, -bound, bound)
    if name in ("int8", "int4"):
        wide = xp.round(xp.nan_to_num(wide))
    return packed(as_dtype(wide, xp.int8)) if name == "int4" else as_dtype(wide, dtype)


def _of_columns(
    scale: Float[Any, "*scale"], shape: tuple[int, ...]
) -> Float[Any, "*rows num_kv_heads one_or_head_dim"]:
    """Scales as factors on rows `[..., num_kv_heads, head_dim]`: of heads, tokens, or groups."""
    if scale.ndim < len(shape) - 1:
        return scale.reshape(*[1] * (len(shape) - 2), -1, 1)
    if scale.ndim < len(shape):
        return scale[..., None]
    group = shape[-1] // scale.shape[-1]
    spread = namespace(scale).broadcast_to(scale[..., None], (*scale.shape, group))
    return spread.reshape(shape)


def row_scales(
    rows: Float[Any, "*rows num_kv_heads head_dim"], dtype
) -> Float[Any, "*rows_and_groups"]:
    """The scales of new keys or values: of each token and KV head, in four bits of each group.

    The largest magnitude, NaN and infinities left out, times the float32 nearest to 1 / the dtype's
    largest value: a product has the same bits everywhere, a quotient has not. Within `BOUNDS`; 1
    where all are zeros.

    >>> row_scales(jnp.array([[[0.0, -63.5], [0.0, 0.0]]]), "int8").tolist()
    [[0.5, 1.0]]
    """
    xp = namespace(rows)
    sizes = abs(as_dtype(rows, xp.float32))
    sizes = xp.where(xp.isfinite(sizes), sizes, 0.0)
    shape, held = scale_shape(rows.shape, dtype), scale_dtype(dtype)
    group = group_of(rows.shape[-1]) if name_of(dtype) in PACKED else rows.shape[-1]
    most = xp.amax(sizes.reshape(*shape, group), -1)
    scale = xp.clip(most * (1 / (largest(dtype) or 1.0)), *BOUNDS[held])
    scale = xp.where(most >= _NORMAL, scale, 1.0)
    if xp is jnp:
        # XLA leaves out the conversion to float16 and back before `quantised` divides.
        bits = jnp.finfo(held)
        scale = lax.stop_gradient(lax.reduce_precision(scale, bits.nexp, bits.nmant))
    return as_dtype(scale, getattr(xp, held))


def dequantised(
    rows: Shaped[Any, "*rows num_kv_heads held_dim"], scale: Float[Any, "*scale"] | None, dtype
) -> Float[Any, "*rows num_kv_heads head_dim"]:
    """What rows of a cache stand for, rounded once to a dtype; without a scale, as they are held.

    >>> dequantised(jnp.array([[2, -4]], jnp.int8), jnp.float32([0.5]), jnp.float32).tolist()
    [[1.0, -2.0]]
    """
    rows = unpacked(rows) if is_packed(rows.dtype) else rows
    if scale is None:
        return as_dtype(rows, dtype)
    xp = namespace(rows)
    wide = xp.float64 if dtype == xp.float64 else xp.float32
    factors = _of_columns(as_dtype(scale, wide), rows.shape)
    return as_dtype(as_dtype(rows, wide) * factors, dtype)


def scale_dtype(dtype) -> str:
    """The dtype of the per-token scales in a cache of a dtype."""
    return "float16" if name_of(dtype) in PACKED else "float32"


def scale_shape(shape: tuple[int, ...], dtype) -> tuple[int, ...]:
    """The shape of tokens' scales for rows `[..., head_dim]` in a cache of a dtype."""
    if name_of(dtype) not in PACKED:
        return shape[:-1]
    return (*shape[:-1], shape[-1] // group_of(shape[-1]))


def of_tokens(scale) -> bool:
    """Whether scales are those of tokens, and no number or one for each head."""
    return scale is not None and scale.ndim > 1


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
_NORMAL = 2.0**-126  # the smallest normal number of float32
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


def held(cache, rows: Iterable[Any]) -> dict[str, Any]:
    """New keys and values as a cache holds them, by its fields, with the scales of its tokens.

    >>> from types import SimpleNamespace as Cache
    >>> cache = Cache(planes=[0], dtype="int8", key_scale=jnp.float32(2), value_scale=None)
    >>> {name: rows.tolist() for name, rows in held(cache, [jnp.array([[4.0]]), None]).items()}
    {'key': [[2]]}
    """
    made = {}
    for _, name, new in zip(cache.planes, ("key", "value"), rows, strict=False):
        scale = getattr(cache, f"{name}_scale")
        if of_tokens(scale):
            scale = made[f"{name}_scale"] = row_scales(new, cache.dtype)
        made[name] = quantised(new, cache.dtype, scale)
    return made


def scale_of_values(cache) -> Any:
    """Those of a latent cache are columns of its keys."""
    return cache.key_scale if cache.value is None else cache.value_scale


def as_read(scale):
    """A scale as kernels read it: those of tokens as they are held, others as float32."""
    return scale if of_tokens(scale) else as_dtype(scale, namespace(scale).float32)

"""Queries as sums of numbers of eight bits, which the matrix unit multiplies by those of a cache.

A query is bfloat16, times a power of two that takes its largest number near the end of the cache's
dtype. Its first part is what that dtype keeps of it, the next one what it keeps of the rest. Parts
are heads of their own to the matrix unit, whose products are added up in float32.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ...dense.float16 import BIAS, exponent_of, factors
from ..kernel_config import KernelConfig

STEP = 256  # of the first part of integers
MOST = 127 * STEP + 127.0  # that two parts are a sum of
ROUNDING = 1.5 * 2.0**23  # a sum with it has the nearest integer in its lowest bits
NOT_FINITE = 2 * BIAS + 1  # the exponent of NaN and infinity


class Split(NamedTuple):
    """How many parts queries have, and the exponent of the largest number of a head."""

    parts: int
    exponent: int


SPLITS = {
    "float8_e4m3fn": Split(2, 7),
    "float8_e5m2": Split(3, 14),
    "int8": Split(2, 14),
}


def query_rows(config: KernelConfig) -> int:
    """Heads of a program, and as many for each further part."""
    return SPLITS[str(config.cache_dtype)].parts * config.rows


def scales_of(largest, dtype: str):
    """What the queries of a head are multiplied by, and what their products are.

    The latter is NaN where a query is, or infinite: no number of eight bits is.
    """
    up, down = factors(largest, SPLITS[dtype].exponent)
    return up, jnp.where(exponent_of(largest) == NOT_FINITE, jnp.nan, down)


def split(numbers, dtype: str) -> list[Any]:
    """The parts of scaled queries, `f32[...]`.

    Their sum is off by at most 1/32640 of the largest number of a head, of float8_e4m3fn 2^-17, of
    float8_e5m2 2^-30: by nothing where these have all their bits.
    """
    return integers(numbers) if dtype == "int8" else floats(numbers, dtype)


def floats(rest, dtype: str) -> list[Any]:
    parts = []
    for _ in range(SPLITS[dtype].parts):
        parts.append(rest.astype(jnp.dtype(dtype)))
        rest = rest - parts[-1].astype(jnp.float32)
    return parts


def integers(numbers) -> list[Any]:
    bits = lax.bitcast_convert_type(jnp.minimum(numbers, MOST) + ROUNDING, jnp.int32)
    return [(bits + STEP // 2 >> 8).astype(jnp.int8), bits.astype(jnp.int8)]


def sum_of_parts(products, heads: int):
    """`f32[keys, heads]` from the products `[keys, parts * heads]` of all parts."""
    parts = [products[:, i : i + heads] for i in range(0, products.shape[1], heads)]
    if products.dtype == jnp.int32:
        first, second = (part.astype(jnp.float32) for part in parts)
        return first * STEP + second
    return sum(parts[1:], parts[0])

"""The paged cache of one layer."""

from dataclasses import dataclass, replace
from typing import Any, Generic

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from . import validate
from .array_type import ArrayT


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache(Generic[ArrayT]):
    """Keys and values of one layer, each `[num_blocks, block_size, num_kv_heads, head_dim]`.

    A pytree of two arrays of one floating dtype, or quantised ones: float8_e4m3fn, float8_e5m2 or
    int8, which stand for `key * key_scale` and `value * value_scale`. Token t of a sequence whose
    block table row is `row` stands at `key[row[t // block_size], t % block_size]`. The arrays may
    be JAX's or torch's. Functions of `pagedattn` read torch's memory without a copy, never write to
    it, and return JAX's arrays.

    Fields, besides key and value:
      key_scale, value_scale: of quantised planes, floating: one number, or one for each KV head,
        `[num_kv_heads]`. None is 1.
    """

    key: Shaped[ArrayT, "num_blocks block_size num_kv_heads head_dim"]
    value: Shaped[ArrayT, "num_blocks block_size num_kv_heads head_dim"]
    key_scale: Float[ArrayT, "*heads"] | None = None
    value_scale: Float[ArrayT, "*heads"] | None = None

    def with_planes(self, key: ArrayT, value: ArrayT) -> "KVCache[ArrayT]":
        """The cache with other planes and the same scales."""
        return replace(self, key=key, value=value)

    @property
    def num_blocks(self) -> int:
        return self.key.shape[0]

    @property
    def block_size(self) -> int:
        return self.key.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[2]

    @property
    def head_dim(self) -> int:
        return self.key.shape[3]

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def dtype(self) -> Any:
        return self.key.dtype


def init_kv_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: DTypeLike = jnp.bfloat16,
    *,
    key_scale: Float[Array, "*heads"] | float | None = None,
    value_scale: Float[Array, "*heads"] | float | None = None,
) -> KVCache[Array]:
    """A cache of zeros: key and value `[num_blocks, block_size, num_kv_heads, head_dim]`.

    Args:
      dtype: floating, or quantised: float8_e4m3fn, float8_e5m2, int8.
      key_scale, value_scale: what quantised keys and values are multiplied by when they are read;
        a number, or one for each KV head. About the largest key or value, over the largest that
        the dtype holds (448, 57344, 127).

    Raises:
      InvalidInputError: a size is below 1, the dtype is neither floating nor int8, scales are not
        positive or for a cache that is not quantised, or there would be more slots than int32
        counts.

    >>> init_kv_cache(4, 16, 2, 64).key.shape
    (4, 16, 2, 64)
    """
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    shape = validate.cache_shape(shape, dtype)
    scales = (scale if scale is None else _scale(scale) for scale in (key_scale, value_scale))
    cache = KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), *scales)
    validate.scales(cache)
    return cache


def _scale(scale):
    return jnp.asarray(scale, jnp.float32) if isinstance(scale, float | int) else scale

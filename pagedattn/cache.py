"""The paged cache of one layer."""

from dataclasses import dataclass
from typing import Any, Generic

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from . import validate
from .array_type import ArrayT


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache(Generic[ArrayT]):
    """Keys and values of one layer, each `[num_blocks, block_size, num_kv_heads, head_dim]`.

    A pytree of two arrays of one floating dtype. Token t of a sequence whose block table row is
    `row` stands at `key[row[t // block_size], t % block_size]`. The arrays may be JAX's or
    torch's. Functions of `pagedattn` read torch's memory without a copy, never write to it, and
    return JAX's arrays.
    """

    key: Float[ArrayT, "num_blocks block_size num_kv_heads head_dim"]
    value: Float[ArrayT, "num_blocks block_size num_kv_heads head_dim"]

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
) -> KVCache[Array]:
    """A cache of zeros: key and value `[num_blocks, block_size, num_kv_heads, head_dim]`.

    Raises:
      InvalidInputError: a size is below 1, the dtype is not floating, or there would be more
        slots than int32 counts.

    >>> init_kv_cache(4, 16, 2, 64).key.shape
    (4, 16, 2, 64)
    """
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    shape = validate.cache_shape(shape, dtype)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

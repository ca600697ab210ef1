"""The paged cache of one layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from .._arrays.checks import count
from .._arrays.inspect import dtype_of
from .._arrays.typing import ArrayT
from . import validate
from .packing import columns, held_dtype, held_shape, meant_dtype
from .quantise import of_tokens, scale_dtype, scale_shape

# Of fields that hold one positive number, one for each KV head, or numbers of each token: whether
# only quantised caches have them. They are checked, copied and moved by that alone.
QUANTISED = {"quantised": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache(Generic[ArrayT]):
    """Keys and values of one layer, each `[num_blocks, block_size, num_kv_heads, head_dim]`.

    A pytree of two arrays of one floating dtype, or quantised ones: float8_e4m3fn, float8_e5m2,
    int8 or int4, which mean `key * key_scale` and `value * value_scale`. int4 is held as uint8,
    `[..., head_dim // 2]`: byte c has column c in its low four bits and column c + head_dim // 2 in
    its high ones, in two's complement. If `row` is a sequence's row of
    the block table, its token t is at `key[row[t // block_size], t % block_size]`. The arrays may
    be JAX's or torch's. Functions of `pagedattn` read torch's memory without a copy, never write to
    it, and return JAX's arrays.

    The values may have another number of columns than the keys: the last axis of `value`. A latent
    cache (DeepSeek's MLA) holds one array: `value` is None, and the values are the first
    `value_dim` columns of the keys.

    Fields, in addition to key and value:
      key_scale, value_scale: of quantised planes, floating: one number, or one for each KV head,
        `[num_kv_heads]`; None is 1. Or those of each token, which `write_kv` computes: float32
        `[num_blocks, block_size, num_kv_heads]`, in int4 float16 `[..., head_dim // group]` for
        each group of 32 columns (or the most that divide both 32 and head_dim). A latent cache has
        the key_scale for both.
      value_dim: the columns of a latent cache that are values; static. None where `value` has them.

    >>> cache = KVCache(jnp.zeros((4, 16, 2, 64)), jnp.zeros((4, 16, 2, 64)))
    >>> cache.num_slots, cache.head_dim
    (64, 64)
    """

    key: Shaped[ArrayT, "num_blocks block_size num_kv_heads held_dim"]
    value: Shaped[ArrayT, "num_blocks block_size num_kv_heads held_value_dim"] | None
    key_scale: Float[ArrayT, "*scale"] | None = field(default=None, metadata=QUANTISED)
    value_scale: Float[ArrayT, "*value_scale"] | None = field(default=None, metadata=QUANTISED)
    value_dim: int | None = field(default=None, metadata={"static": True})

    def with_planes(self, key: ArrayT, value: ArrayT | None = None) -> "KVCache[ArrayT]":
        """The cache with other planes, and the same scales and value_dim."""
        return replace(self, key=key, value=value)

    @property
    def planes(self) -> tuple[ArrayT, ...]:
        """The arrays that hold the tokens: key and value, or the key of a latent cache."""
        return (self.key,) if self.value is None else (self.key, self.value)

    @property
    def by_slot(self) -> dict[str, ArrayT]:
        """The arrays with a row for each slot, by their fields: the planes, and tokens' scales."""
        arrays = {"key": self.key, "value": self.value}
        for name in validate.of_heads(type(self)):
            if of_tokens(scale := getattr(self, name)):
                arrays[name] = scale
        return {name: array for name, array in arrays.items() if array is not None}

    @property
    def token_scales(self) -> bool:
        """Whether each token has scales of its own."""
        return of_tokens(self.key_scale)

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
        """The columns of a key, whatever their number in a byte."""
        return columns(self.key)

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def dtype(self) -> Any:
        """The dtype of the numbers: that of the planes, or int4."""
        return meant_dtype(self.key.dtype)


Scales = Literal["head", "token"]


def init_kv_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: DTypeLike = jnp.bfloat16,
    *,
    scales: Scales | None = None,
    key_scale: Float[Array, "*heads"] | float | None = None,
    value_scale: Float[Array, "*value_heads"] | float | None = None,
    value_dim: int | None = None,
) -> KVCache[Array]:
    """A cache of zeros: key and value `[num_blocks, block_size, num_kv_heads, head_dim]`.

    Args:
      dtype: floating, or quantised: float8_e4m3fn, float8_e5m2, int8, int4.
      scales: of a quantised cache: "head", those that are given, or "token", one for each token
        and KV head (in int4 for each group of columns), which `write_kv` computes. None is "head",
        and "token" for int4, which has no others.
      key_scale, value_scale: what quantised keys and values are multiplied by when they are read;
        a number, or one for each KV head. About the largest key or value, over the largest that
        the dtype holds (448, 57344, 127). None is 1; int8 needs both, unless scales are asked for.
        They are copied: the cache can be donated.
      value_dim: the last axis of the value, where it is not head_dim. For one array with the
        values among the keys' columns there is `init_latent_cache`.

    Raises:
      InvalidInputError: num_blocks is negative or another size below 1, the dtype is neither
        floating nor int8 nor int4, int4 with an odd number of columns, scales are not positive,
        missing for int8 or given for what is not quantised, or there would be more slots than int32
        counts.

    >>> init_kv_cache(4, 16, 2, 64).key.shape
    (4, 16, 2, 64)
    >>> cache = init_kv_cache(4, 16, 2, 64, "int4")
    >>> cache.key.shape, cache.key_scale.shape, cache.head_dim
    ((4, 16, 2, 32), (4, 16, 2, 2), 64)
    """
    shape = validate.cache_shape((num_blocks, block_size, num_kv_heads, head_dim), dtype)
    value_dim = shape[3] if value_dim is None else count("value_dim", value_dim)
    given = _scale(key_scale), _scale(value_scale)
    cache = empty_cache(_full, (shape, (*shape[:3], value_dim)), dtype, scales, given)
    validate.kv_cache(cache)
    return cache


def init_latent_cache(
    num_blocks: int,
    block_size: int,
    head_dim: int,
    value_dim: int,
    dtype: DTypeLike = jnp.bfloat16,
    *,
    num_kv_heads: int = 1,
    scales: Scales | None = None,
    key_scale: Float[Array, "*heads"] | float | None = None,
) -> KVCache[Array]:
    """A latent cache of zeros: one array, with the values as its first `value_dim` columns.

    For multi-head latent attention (MLA) with absorbed projections. DeepSeek-V3 has 512 columns of
    latents, which are keys and values, and 64 of rotary keys: head_dim 576 and value_dim 512.

    Args:
      dtype, scales, key_scale: as in `init_kv_cache`; the scale is that of keys and values.

    Returns:
      `KVCache(key, None, key_scale, value_dim=value_dim)`, key being
      `[num_blocks, block_size, num_kv_heads, head_dim]`.

    Raises:
      InvalidInputError: as `init_kv_cache`, or value_dim is above head_dim.

    >>> cache = init_latent_cache(4, 16, 576, 512)
    >>> cache.key.shape, cache.value, cache.value_dim
    ((4, 16, 1, 576), None, 512)
    """
    shape = validate.cache_shape((num_blocks, block_size, num_kv_heads, head_dim), dtype)
    value_dim = count("value_dim", value_dim)
    cache = empty_cache(_full, (shape,), dtype, scales, (_scale(key_scale),))
    cache = replace(cache, value_dim=value_dim)
    validate.kv_cache(cache)
    return cache


def empty_cache(full: Callable, shapes, dtype, scales, given: Sequence[Any]) -> KVCache:
    """A cache of zeros, of whatever framework `full(shape, number, dtype)` makes arrays.

    Args:
      shapes: of the key and of the value, in columns; of the key alone for a latent cache.
      given: the scale of each, or None.
    """
    validate.whole_bytes(shapes, dtype)
    by_token = validate.kind_of_scales(scales, dtype, given) == "token"
    planes = [full(held_shape(shape, dtype), 0, held_dtype(dtype)) for shape in shapes]
    if by_token:
        given = [full(scale_shape(shape, dtype), 1, scale_dtype(dtype)) for shape in shapes]
    return KVCache(*planes, *[None] * (2 - len(planes)), *given)


def _full(shape, number, dtype):
    return jnp.full(shape, number, dtype_of(dtype))  # torch's dtypes too


def _scale(scale):
    if isinstance(scale, jax.Array):
        return jnp.array(scale)  # a copy: a cache may be donated, and other caches may have it too
    return jnp.asarray(scale, jnp.float32) if isinstance(scale, float | int) else scale

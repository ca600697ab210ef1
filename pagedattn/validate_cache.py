"""Checks of a cache: its shape, its dtype and its scales."""

import operator

import numpy as np

from . import validate_values
from .checks import MAX_SLOTS, an_array, is_count, known_sizes, require
from .facts import describe, is_floating, known, shown
from .quantise import LARGEST, largest


def cache_shape(shape, dtype) -> tuple[int, ...]:
    """The sizes as Python's integers."""
    num_blocks, *others = shape
    fit = is_count(num_blocks, 0) and all(map(is_count, others))
    require(
        fit and num_blocks * others[0] <= MAX_SLOTS,
        "num_blocks must be an integer of at least 0, block_size, num_kv_heads and head_dim above "
        f"0, and num_blocks * block_size must fit int32, got {[*map(shown, shape)]}",
    )
    require(
        is_floating(dtype) or largest(dtype) is not None,
        f"a cache's dtype must be floating or int8, such as jnp.bfloat16, got {shown(dtype)}",
    )
    return tuple(map(operator.index, shape))


def kv_cache(cache) -> None:
    """Requires a key, and a value that fits it or the number of its columns that are values."""
    require(
        not hasattr(cache, "get_value"),
        f"cache must be a KVCache, got {type(cache).__name__}, a variable that holds one: its "
        ".get_value() is the cache. The page on layers keeps it out of the module, so that it can "
        "be donated",
    )
    require(
        hasattr(cache, "key") and hasattr(cache, "value"),
        f"cache must be a KVCache, got {type(cache).__name__}; KVCache(key, value) makes one of "
        "two arrays",
    )
    key = cache.key
    an_array("the cache's key", key)
    known_sizes("the cache's key", key)
    require(
        key.ndim == 4,
        "a cache's key must be [num_blocks, block_size, num_kv_heads, head_dim], got "
        f"{describe(key)}",
    )
    cache_shape(tuple(key.shape), key.dtype)
    validate_values.values(cache)
    scales(cache)


def scales(cache) -> None:
    """Requires scales of quantised caches only, one or one for each KV head, above 0."""
    for name in ("key_scale", "value_scale"):
        scale = getattr(cache, name, None)
        if scale is not None:
            _scale(f"the cache's {name}", scale, cache)


def _scale(name, scale, cache):
    an_array(name, scale)
    shapes = ((), (cache.num_kv_heads,))
    require(
        tuple(scale.shape) in shapes and is_floating(scale.dtype),
        f"{name} must be one floating number, or [num_kv_heads] = {shapes[1]}, got "
        f"{describe(scale)}",
    )
    require(
        largest(cache.dtype) is not None,
        f"{name} is for a cache of {', '.join(LARGEST)}, this one is {cache.dtype}",
    )
    values = known(scale)
    require(
        values is None or bool((np.isfinite(values) & (values > 0)).all()),
        f"{name} must be above 0, got {values}",
    )


def goes_with(dtype, cache_dtype) -> bool:
    """Whether queries, keys and values of a dtype go with a cache: its own, or if quantised any."""
    if largest(cache_dtype) is None:
        return dtype == cache_dtype
    return is_floating(dtype) and largest(dtype) is None


def dtypes_for(cache_dtype) -> str:
    if largest(cache_dtype) is None:
        return f"the cache's dtype {cache_dtype}"
    return f"a floating dtype of 16 bits or more, which a cache of {cache_dtype} goes with"

"""Checks of the values of a cache: a plane beside the keys, or columns of the keys."""

import numpy as np

from .checks import an_array, is_count, require
from .facts import describe, shown


def values(cache) -> None:
    """Requires a value plane that fits the key, or in a latent cache the number of its columns."""
    given = getattr(cache, "value_dim", None)
    if cache.value is None:
        _latent(given, cache)
    else:
        an_array("the cache's value", cache.value)
        _plane(cache.value, given, cache.key)


def _plane(value, given, key):
    require(
        value.ndim == 4 and value.shape[:3] == key.shape[:3] and value.dtype == key.dtype,
        "a cache's key and value must be [num_blocks, block_size, num_kv_heads, head_dim] and "
        f"[..., value_dim] of one dtype, got {describe(key)} and {describe(value)}",
    )
    value_dim = value.shape[3]
    require(value_dim > 0, f"a cache's value must have a column at least, got {describe(value)}")
    require(
        given is None or (is_static_count(given) and given == value_dim),
        f"value_dim of a cache with a value is its last axis, {value_dim}: leave it out, got "
        f"{shown(given)}",
    )


def _latent(value_dim, cache):
    head_dim = cache.key.shape[3]
    require(
        is_static_count(value_dim) and value_dim <= head_dim,
        "a cache without a value needs value_dim, the number of its key's columns that are values: "
        f"a Python integer from 1 to head_dim = {head_dim}, got {shown(value_dim)}",
    )
    require(
        getattr(cache, "value_scale", None) is None,
        "value_scale must be None in a latent cache: its values are columns of its keys, whose "
        "scale is key_scale",
    )


def no_value(value) -> None:
    """Requires that no values are given to be written to a latent cache."""
    require(
        value is None,
        "value must be None for a latent cache, whose values are columns of its keys, got "
        f"{shown(value)}",
    )


def same_blocks(src_cache, dst_cache) -> None:
    """Requires caches of which a block of one can be a block of the other."""
    require(
        _block(src_cache) == _block(dst_cache) and src_cache.dtype == dst_cache.dtype,
        "the caches must agree in block_size, num_kv_heads, head_dim, value_dim and dtype, got "
        f"{' and '.join(map(_described, (src_cache, dst_cache)))}",
    )


def _block(cache):
    latent = cache.value is None
    return [tuple(plane.shape[1:]) for plane in cache.planes], latent and cache.value_dim


def _described(cache) -> str:
    if cache.value is None:
        return f"{describe(cache.key)} of value_dim {cache.value_dim}"
    return f"{describe(cache.key)} with {describe(cache.value)}"


def is_static_count(value, least=1) -> bool:
    """Whether a value is an integer of Python's or NumPy's, of at least `least`: no array."""
    return isinstance(value, int | np.integer) and is_count(value, least)

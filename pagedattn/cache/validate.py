"""Checks of a cache.

Shapes and dtypes are always checked, values where they are known on the host.
"""

import functools
import operator
from collections.abc import Hashable

import numpy as np

from .._arrays.checks import (
    MAX_SLOTS,
    an_array,
    is_count,
    known_sizes,
)
from .._arrays.inspect import describe, dtype_name, is_computed, is_floating, known, shown
from ..errors import InvalidInputError
from .packing import PACKED, columns, is_packed, meant_dtype, name_of
from .quantise import LARGEST, largest, of_tokens, scale_dtype, scale_shape

LEAST = float(np.finfo(np.float32).tiny)  # of a scale: XLA takes smaller numbers for 0


def cache_shape(shape, dtype) -> tuple[int, ...]:
    """The sizes as Python's integers."""
    num_blocks, *others = shape
    fit = is_count(num_blocks, 0) and all(map(is_count, others))
    if not (fit and num_blocks * others[0] <= MAX_SLOTS):
        raise InvalidInputError(
            "num_blocks must be an integer of at least 0, block_size, num_kv_heads and head_dim "
            f"above 0, and num_blocks * block_size must fit int32, got {[*map(shown, shape)]}"
        )
    known_dtype = isinstance(dtype, Hashable) and (is_computed(dtype) or largest(dtype) is not None)
    if not known_dtype:
        raise InvalidInputError(
            "a cache's dtype must be floating of 16 bits or more, float8_e4m3fn, float8_e5m2, "
            f"int8 or int4, got {shown(dtype)}"
        )
    return tuple(map(operator.index, shape))


def whole_bytes(shapes, dtype) -> None:
    """Requires that numbers of four bits fill the bytes of a row."""
    odd = [shape[3] for shape in shapes if shape[3] % 2]
    if odd and name_of(dtype) in PACKED:
        raise InvalidInputError(
            f"head_dim and value_dim of {name_of(dtype)}, two numbers a byte, must be even, got "
            f"{odd[0]}"
        )


def kind_of_scales(scales, dtype, given) -> str:
    """Whether a new cache has per-head or per-token scales: "head" or "token"."""
    packs, quantised = name_of(dtype) in PACKED, largest(dtype) is not None
    kind = ("token" if packs else "head") if scales is None else scales
    fits = kind == "token" if packs else kind in (("head", "token") if quantised else ("head",))
    if not fits:
        raise InvalidInputError(
            'scales must be "head", or of a quantised cache "token", which int4 has always, got '
            f"{shown(scales)} for {shown(dtype)}"
        )
    if kind == "token" and any(scale is not None for scale in given):
        raise InvalidInputError(
            "key_scale and value_scale must be None with per-token scales, which write_kv computes"
        )
    if scales is None and name_of(dtype) == "int8":
        _not_whole_numbers(given)
    return kind


def _not_whole_numbers(given) -> None:
    """Requires all scales of an int8 cache, since without one it holds whole numbers.

    Keys and values are mostly below 1. float8 keeps their leading bits by any scale.
    """
    if any(scale is None for scale in given):
        needed = " and ".join(("key_scale", "value_scale")[: len(given)])
        raise InvalidInputError(
            f'an int8 cache needs scales="token", or {needed}: without, keys and values are '
            'rounded to whole numbers; scales="head" asks for that'
        )


# Of caches that exist: an eager call asks for each layer.
_shape_fits = functools.lru_cache(cache_shape)


def kv_cache(cache) -> None:
    """Requires a key, and a value that fits it or the number of its columns that are values."""
    if hasattr(cache, "get_value"):
        raise InvalidInputError(
            f"cache must be a KVCache, got {type(cache).__name__}, a variable that holds one: its "
            ".get_value() is the cache. The page on layers keeps it out of the module, so that it "
            "can be donated"
        )
    if not (hasattr(cache, "key") and hasattr(cache, "value")):
        raise InvalidInputError(
            f"cache must be a KVCache, got {type(cache).__name__}; KVCache(key, value) makes one "
            "of two arrays"
        )
    key = cache.key
    an_array("the cache's key", key)
    known_sizes("the cache's key", key)
    if key.ndim != 4:
        raise InvalidInputError(
            "a cache's key must be [num_blocks, block_size, num_kv_heads, head_dim], got "
            f"{describe(key)}"
        )
    if name_of(key.dtype) in PACKED:
        raise InvalidInputError(
            f"the planes of an {key.dtype} cache are uint8, two numbers a byte, got "
            f"{describe(key)}: init_kv_cache makes them"
        )
    _shape_fits((*key.shape[:3], columns(key)), meant_dtype(key.dtype))
    value_plane(cache)
    scales(cache)


@functools.cache
def of_heads(cache_type: type) -> dict[str, bool]:
    """The fields of a cache that hold numbers of KV heads; whether of quantised caches alone."""
    fields = getattr(cache_type, "__dataclass_fields__", {}).values()
    return {f.name: f.metadata["quantised"] for f in fields if "quantised" in f.metadata}


def scales(cache) -> None:
    """Requires scales of quantised caches only: numbers above 0, or those of tokens for all."""
    some = is_packed(cache.key.dtype)
    for name, of_quantised in of_heads(type(cache)).items():
        scale = getattr(cache, name)
        if scale is not None:
            _scale(f"the cache's {name}", scale, cache, of_quantised)
            some = some or of_tokens(scale)
    if some:
        _of_tokens(cache)


def _scale(name, scale, cache, of_quantised):
    an_array(name, scale)
    if of_quantised and largest(meant_dtype(cache.key.dtype)) is None:
        raise InvalidInputError(
            f"{name} is for a cache of {', '.join(LARGEST | PACKED)}, this one is {cache.dtype}"
        )
    if of_quantised and of_tokens(scale):
        return  # their values are as many as rows, and those of no token may be anything
    shapes = ((), (cache.num_kv_heads,))
    if not (tuple(scale.shape) in shapes and is_floating(scale.dtype)):
        raise InvalidInputError(
            f"{name} must be one floating number, or [num_kv_heads] = {shapes[1]}, got "
            f"{describe(scale)}"
        )
    values = known(scale)
    if values is not None and not bool((np.isfinite(values) & (values >= LEAST)).all()):
        raise InvalidInputError(f"{name} must be above 0 (at least {LEAST:.2g}), got {values}")


def _of_tokens(cache):
    """Requires per-token scales for every plane."""
    named = {"key_scale": cache.key}
    if cache.value is not None:
        named["value_scale"] = cache.value
    dtype = meant_dtype(cache.key.dtype)
    for name, plane in named.items():
        scale = getattr(cache, name, None)
        shape = scale_shape((*plane.shape[:3], columns(plane)), dtype)
        expected = f"{scale_dtype(dtype)}{list(shape)}"
        got = None if scale is None else f"{dtype_name(scale.dtype)}{list(scale.shape)}"
        if got != expected:
            raise InvalidInputError(
                f"the cache's {name} must be {expected}, scales for each token of its {dtype} "
                f"plane, got {got}"
            )


def goes_with(dtype, cache_dtype) -> bool:
    """Whether queries, keys and values of a dtype go with a cache: its own, or if quantised any."""
    if largest(cache_dtype) is None:
        return dtype == cache_dtype
    return is_computed(dtype)


def dtypes_for(cache_dtype) -> str:
    if largest(cache_dtype) is None:
        return f"the cache's dtype {cache_dtype}"
    return f"a floating dtype of 16 bits or more, for a cache of {cache_dtype}"


def value_plane(cache) -> None:
    """Requires a value plane that fits the key, or in a latent cache the number of its columns."""
    given = getattr(cache, "value_dim", None)
    if cache.value is None:
        _latent(given, cache)
    else:
        an_array("the cache's value", cache.value)
        _plane(cache.value, given, cache.key)


def _plane(value, given, key):
    if not (value.ndim == 4 and value.shape[:3] == key.shape[:3] and value.dtype == key.dtype):
        raise InvalidInputError(
            "a cache's key and value must be [num_blocks, block_size, num_kv_heads, head_dim] and "
            f"[..., value_dim] of one dtype, got {describe(key)} and {describe(value)}"
        )
    if not value.shape[3] > 0:
        raise InvalidInputError(
            f"a cache's value must have a column at least, got {describe(value)}"
        )
    if given is not None and not (is_static_count(given) and given == columns(value)):
        raise InvalidInputError(
            f"value_dim of a cache with a value is its last axis, {columns(value)}: leave it out, "
            f"got {shown(given)}"
        )


def _latent(value_dim, cache):
    head_dim = columns(cache.key)
    if not (is_static_count(value_dim) and value_dim <= head_dim):
        raise InvalidInputError(
            "a cache without a value needs value_dim, the number of its key's columns that are "
            f"values: a Python integer from 1 to head_dim = {head_dim}, got {shown(value_dim)}"
        )
    if getattr(cache, "value_scale", None) is not None:
        raise InvalidInputError(
            "value_scale must be None in a latent cache: its values are columns of its keys, "
            "whose scale is key_scale"
        )


def no_value(value) -> None:
    """Requires that no values are given to be written to a latent cache."""
    if value is not None:
        raise InvalidInputError(
            "value must be None for a latent cache, whose values are columns of its keys, got "
            f"{shown(value)}"
        )


def is_static_count(value, least=1) -> bool:
    """Whether a value is an integer of Python's or NumPy's, of at least `least`: no array."""
    return (type(value) is int and value >= least) or (
        isinstance(value, int | np.integer) and is_count(value, least)
    )

"""Checks of the arguments of functions on a cache, made before anything is written.

Shapes and dtypes are always checked, under jit while tracing. Values are checked only where they
are known on the host: traced arrays have none yet, and reading a GPU's would wait for it.
"""

import operator

import numpy as np

from . import validate_metadata, validate_values
from .checks import (
    MAX_SLOTS,
    an_array,
    count,
    describe,
    distinct_slots,
    ids,
    int_array,
    is_count,
    is_floating,
    is_integer,
    known,
    require,
    shown,
    start_locs,
)
from .quantise import LARGEST, largest
from .spec import AttentionSpec


def cache_shape(shape, dtype) -> tuple[int, ...]:
    """The sizes as Python's integers."""
    sizes = tuple(operator.index(size) if is_count(size) else 0 for size in shape)
    require(
        all(sizes) and sizes[0] * sizes[1] <= MAX_SLOTS,
        "num_blocks, block_size, num_kv_heads and head_dim must be integers above 0, and "
        f"num_blocks * block_size must fit int32, got {[*map(shown, shape)]}",
    )
    require(
        is_floating(dtype) or largest(dtype) is not None,
        f"a cache's dtype must be floating or int8, got {shown(dtype)}",
    )
    return sizes


def kv_cache(cache) -> None:
    """Requires a key, and a value that fits it or the number of its columns that are values."""
    require(
        hasattr(cache, "key") and hasattr(cache, "value"),
        f"cache must be a KVCache, got {type(cache).__name__}",
    )
    key = cache.key
    an_array("the cache's key", key)
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


def write(cache, key, value, slot_mapping) -> None:
    kv_cache(cache)
    int_array("slot_mapping", slot_mapping, 1)
    _rows("key", "head_dim", key, cache.key, slot_mapping)
    if cache.value is None:
        validate_values.no_value(value)
    else:
        _rows("value", "value_dim", value, cache.value, slot_mapping)
    slots = known(slot_mapping)
    if slots is not None:
        ids("slot_mapping", slots[slots != -1], cache.num_slots, "slots, or -1 for no write")
        distinct_slots(slots)


def _rows(name, columns, rows, plane, slot_mapping):
    an_array(name, rows)
    expected = (*slot_mapping.shape[:1], *plane.shape[2:])
    require(
        rows.shape == expected and _goes_with(rows.dtype, plane.dtype),
        f"{name} must be [num_tokens, num_kv_heads, {columns}] = {expected} of "
        f"{_dtypes(plane.dtype)}, got {describe(rows)}",
    )


def _goes_with(dtype, cache_dtype) -> bool:
    """Whether queries, keys and values of a dtype go with a cache: its own, or if quantised any."""
    if largest(cache_dtype) is None:
        return dtype == cache_dtype
    return is_floating(dtype) and largest(dtype) is None


def _dtypes(cache_dtype) -> str:
    if largest(cache_dtype) is None:
        return f"the cache's dtype {cache_dtype}"
    return f"a floating dtype of 16 bits or more, which a cache of {cache_dtype} goes with"


def block_copies(src_cache, dst_cache, src, dst) -> None:
    kv_cache(src_cache)
    kv_cache(dst_cache)
    validate_values.same_blocks(src_cache, dst_cache)
    for name in ("key_scale", "value_scale"):
        _same_scales(name, getattr(src_cache, name, None), getattr(dst_cache, name, None))
    int_array("src", src, 1)
    int_array("dst", dst, 1)
    require(
        src.shape == dst.shape,
        f"src and dst must be equally long, got {tuple(src.shape)}, {tuple(dst.shape)}",
    )
    _known_copies(known(src), known(dst), src_cache.num_blocks, dst_cache.num_blocks)


def fill(cache, blocks, value) -> None:
    kv_cache(cache)
    int_array("blocks", blocks, getattr(blocks, "ndim", 1))
    dtype = getattr(value, "dtype", None)
    number = isinstance(value, float | int) or getattr(value, "ndim", 1) == 0
    number = number and (dtype is None or is_floating(dtype) or is_integer(dtype))
    require(number, f"value must be one number, got {shown(value)}")
    values = known(blocks)
    if values is not None:
        ids("blocks", values[values != -1], cache.num_blocks, "blocks (or -1)")


def _same_scales(name, src, dst):
    """Blocks are copied as they are held, so they must stand for the same in both caches."""
    if src is dst:
        return
    values = [None if scale is None else known(scale) for scale in (src, dst)]
    equal = (src is None) == (dst is None) and src.shape == dst.shape
    if equal and not any(value is None for value in values):
        equal = (values[0] == values[1]).all()
    require(equal, f"the caches must agree in {name}, got {values[0]} and {values[1]}")


def _known_copies(src, dst, num_src, num_dst):
    if src is not None:
        ids("src", src[src != -1], num_src, "blocks, or -1 for no copy")
    if dst is not None:
        dst = dst[dst != -1]
        ids("dst", dst, num_dst, "blocks, or -1 for no copy")
        require(len(np.unique(dst)) == len(dst), f"dst names a block twice: {dst.tolist()}")


def attention(query, cache, batch, spec, return_lse) -> None:
    """Checks shapes, dtypes and, where they are known, values of an attention call."""
    require(
        isinstance(return_lse, bool), f"return_lse must be True or False, got {shown(return_lse)}"
    )
    kv_cache(cache)
    validate_metadata.shapes(batch)
    require(isinstance(spec, AttentionSpec), f"spec is no AttentionSpec: {type(spec).__name__}")
    _query(query, cache.dtype, cache.num_kv_heads, cache.head_dim, spec)
    require(
        query.shape[0] == batch.num_tokens,
        f"query must have the batch's {batch.num_tokens} tokens, got shape {tuple(query.shape)}",
    )
    require(
        batch.block_size == cache.block_size,
        f"the batch was made for blocks of {batch.block_size}, the cache has {cache.block_size}",
    )
    validate_metadata.values(batch, cache.num_blocks, spec.sliding_window)


def _query(query, dtype, num_kv_heads, head_dim, spec):
    an_array("query", query)
    require(
        query.ndim == 3 and query.shape[2] == head_dim,
        f"query must be [num_tokens, num_heads, head_dim] with head_dim {head_dim}, got "
        f"{describe(query)}",
    )
    require(
        _goes_with(query.dtype, dtype),
        f"keys and values of {dtype} do not go with a query of {query.dtype}, which must be of "
        f"{_dtypes(dtype)}: make the cache with the query's dtype (init_kv_cache(..., "
        "dtype=query.dtype)), or cast the query",
    )
    num_heads = query.shape[1]
    require(
        num_heads > 0 and num_kv_heads > 0 and num_heads % num_kv_heads == 0,
        f"num_heads must be a multiple of num_kv_heads = {num_kv_heads}, got {num_heads}",
    )
    slopes = spec.alibi_slopes
    require(
        slopes is None or len(slopes) == num_heads,
        f"alibi_slopes must have one slope for each of the {num_heads} query heads, got "
        f"{len(slopes or ())}",
    )


def ragged(query, key, value, query_start_loc, key_start_loc, spec, max_lens) -> tuple[int, int]:
    """The bounds as Python's integers."""
    longest_query = count("max_query_len", max_lens[0], 0)
    longest_key = count("max_key_len", max_lens[1], 0)
    an_array("key", key)
    an_array("value", value)
    require(
        key.ndim == value.ndim == 3
        and key.shape[:2] == value.shape[:2]
        and key.dtype == value.dtype,
        "key and value must be [num_keys, num_kv_heads, head_dim] and [num_keys, num_kv_heads, "
        f"value_dim] of one dtype, got {describe(key)} and {describe(value)}",
    )
    require(is_floating(key.dtype), f"key must be floating, got {key.dtype}")
    require(isinstance(spec, AttentionSpec), f"spec is no AttentionSpec: {type(spec).__name__}")
    _query(query, key.dtype, key.shape[1], key.shape[2], spec)
    arrays = {"query_start_loc": query_start_loc, "key_start_loc": key_start_loc}
    bounds = ((query.shape[0], longest_query), (key.shape[0], longest_key))
    for (name, starts), (tokens, longest) in zip(arrays.items(), bounds, strict=True):
        int_array(name, starts, 1)
        require(len(starts) > 0, f"{name} must be [num_seqs + 1], got no entry")
        if known(starts) is not None:
            start_locs(name, known(starts), tokens, longest)
    require(
        query_start_loc.shape == key_start_loc.shape,
        "query_start_loc and key_start_loc must be [num_seqs + 1] both, got "
        f"{tuple(query_start_loc.shape)} and {tuple(key_start_loc.shape)}",
    )
    return longest_query, longest_key

"""Checks of what is written to a cache or copied in it, made before anything is written.

Shapes and dtypes are always checked, values where they are known on the host.
"""

import numpy as np

from .._arrays.checks import an_array, distinct_slots, ids, int_array, known_sizes, packed
from .._arrays.inspect import describe, is_floating, is_integer, known, shown
from ..errors import InvalidInputError
from .packing import columns, meant_dtype
from .quantise import of_tokens
from .validate import dtypes_for, goes_with, kv_cache, no_value, of_heads


def write(cache, key, value, slot_mapping) -> None:
    kv_cache(cache)
    int_array("slot_mapping", slot_mapping, 1)
    known_sizes("slot_mapping", slot_mapping)
    _rows("key", "[num_tokens, num_kv_heads, head_dim]", key, cache.key, "num_tokens")
    if cache.value is None:
        no_value(value)
    else:
        shape = "[num_tokens, num_kv_heads, value_dim]"
        _rows("value", shape, value, cache.value, key.shape[0])
    if slot_mapping.shape[0] != key.shape[0]:
        raise InvalidInputError(
            f"slot_mapping must have a slot for each of the {key.shape[0]} tokens of key, got "
            f"{slot_mapping.shape[0]}; -1 writes nothing"
        )
    slots(slot_mapping, cache.num_slots)


def slots(slot_mapping, num_slots) -> None:
    """Requires slots of the cache, or -1, each once, where they are known."""
    slots = known(slot_mapping)
    if slots is not None:
        ids("slot_mapping", slots[slots != -1], num_slots, "slots", ", or -1 for no write")
        distinct_slots(slots)


def _rows(name, axes, rows, plane, num_tokens):
    an_array(name, rows)
    known_sizes(name, rows)
    packed(name, rows)
    dtype, shape = meant_dtype(plane.dtype), (plane.shape[2], columns(plane))
    fits = rows.ndim == 3 and tuple(rows.shape[1:]) == shape
    fits = fits and num_tokens in ("num_tokens", rows.shape[0])
    if not (fits and goes_with(rows.dtype, dtype)):
        raise InvalidInputError(
            f"{name} must be {axes} = [{num_tokens}, {shape[0]}, {shape[1]}] of "
            f"{dtypes_for(dtype)}, got {describe(rows)}"
        )


def block_copies(src_cache, dst_cache, src, dst) -> None:
    kv_cache(src_cache)
    kv_cache(dst_cache)
    same_blocks(src_cache, dst_cache)
    for name in of_heads(type(dst_cache)):
        _same_scales(name, getattr(src_cache, name, None), getattr(dst_cache, name))
    int_array("src", src, 1)
    int_array("dst", dst, 1)
    known_sizes("src", src)
    if src.shape != dst.shape:
        raise InvalidInputError(
            f"src and dst must be equally long, got {tuple(src.shape)}, {tuple(dst.shape)}"
        )
    _known_copies(known(src), known(dst), src_cache.num_blocks, dst_cache.num_blocks)


def same_blocks(src_cache, dst_cache) -> None:
    """Requires caches of which a block of one can be a block of the other."""
    if not (_block(src_cache) == _block(dst_cache) and src_cache.dtype == dst_cache.dtype):
        raise InvalidInputError(
            "the caches must agree in block_size, num_kv_heads, head_dim, value_dim and dtype, "
            f"got {' and '.join(map(_described, (src_cache, dst_cache)))}"
        )


def _block(cache):
    latent = cache.value is None
    return [tuple(plane.shape[1:]) for plane in cache.planes], latent and cache.value_dim


def _described(cache) -> str:
    if cache.value is None:
        return f"{describe(cache.key)} of value_dim {cache.value_dim}"
    return f"{describe(cache.key)} with {describe(cache.value)}"


def _same_scales(name, src, dst):
    """Blocks are copied as they are held, so they must stand for the same in both caches."""
    if src is dst:
        return
    values = [None if scale is None else known(scale) for scale in (src, dst)]
    equal = (src is None) == (dst is None) and src.shape == dst.shape
    if of_tokens(src) and of_tokens(dst):
        return  # they are copied with their blocks, and `kv_cache` has held them to the planes
    if equal and not any(value is None for value in values):
        equal = (values[0] == values[1]).all()
    if not equal:
        raise InvalidInputError(f"the caches must agree in {name}, got {values[0]} and {values[1]}")


def _known_copies(src, dst, num_src, num_dst):
    if src is not None:
        ids("src", src[src != -1], num_src, "blocks", ", or -1 for no copy")
    if dst is not None:
        ids("dst", dst[dst != -1], num_dst, "blocks", ", or -1 for no copy")
    if src is not None and dst is not None:
        written = dst[(src != -1) & (dst != -1)]
        twice = len(np.unique(written)) < len(written)
        if twice:
            raise InvalidInputError(f"dst names a block twice: {written.tolist()}")


def fill(cache, blocks, value) -> None:
    kv_cache(cache)
    int_array("blocks", blocks, getattr(blocks, "ndim", 1))
    known_sizes("blocks", blocks)
    dtype = getattr(value, "dtype", None)
    number = isinstance(value, float | int) or getattr(value, "ndim", 1) == 0
    number = number and (dtype is None or is_floating(dtype) or is_integer(dtype))
    if not number:
        raise InvalidInputError(f"value must be one number, got {shown(value)}")
    values = known(blocks)
    if values is not None:
        ids("blocks", values[values != -1], cache.num_blocks, "blocks", ", or -1")

"""Writing to a paged cache: tokens to their slots, blocks copied, swapped and filled."""

import contextlib
from dataclasses import replace
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Integer, Shaped

from ._arrays.devices import device_of, on_one_device
from ._arrays.dlpack import takes_any_array
from ._arrays.int32 import int32
from ._arrays.namespace import in_range, set_at
from ._dispatch.registry import can_load
from .batch.indices import PAD_SLOT
from .cache import validate_writes as validate
from .cache.kv_cache import KVCache
from .cache.packing import columns
from .cache.quantise import held, largest
from .errors import UnsupportedError

WIDENED = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # what XLA:CPU computes in a wider dtype
# Modules with a `set_rows` in machine code, by the backend whose packages each needs.
SETTERS = {"numba": "pagedattn.backends.numba.scatter", "sdpa": "pagedattn_interop.backends"}


@takes_any_array
@on_one_device
def write_kv(
    cache: KVCache,
    key: Float[Array, "num_tokens num_kv_heads head_dim"],
    value: Float[Array, "num_tokens num_kv_heads value_dim"] | None,
    slot_mapping: Integer[Any, "num_tokens"],
) -> KVCache[Array]:
    """Writes the keys and values of new tokens to their slots; slot -1 writes nothing.

    A quantised cache gets them divided by its scales, rounded to the nearest (ties to even) and
    saturating: what its dtype cannot hold, infinity too, becomes its largest value. NaN stays NaN,
    in integers it becomes 0. Keys and values may then be of any floating dtype. Scales of tokens
    are computed here: the largest finite magnitude of a row (in int4 of each group of columns)
    over the largest value of the dtype, 1 for zeros.

    In place when an enclosing `jax.jit` donates the cache; otherwise the cache given stays as it
    was. On a CPU without Numba and torch, XLA rewrites a whole bfloat16 or float8 cache at each
    write: install one of them. Inside jit a slot outside the cache is dropped, and which of two
    tokens with one slot wins is not defined; outside jit both are errors.

    A latent cache takes None as value: its values are columns of its keys.

    Raises:
      InvalidInputError: wrong shapes or dtypes; outside jit also slots out of range or given twice.

    >>> from pagedattn import init_kv_cache
    >>> cache = write_kv(init_kv_cache(2, 2, 1, 1), *jnp.ones((2, 1, 1, 1), jnp.bfloat16),
    ...                  jnp.array([3]))
    >>> cache.key.ravel().tolist()
    [0.0, 0.0, 0.0, 1.0]
    """
    validate.write(cache, key, value, slot_mapping)
    return _set(cache, slot_mapping, key, value)


@takes_any_array
def copy_blocks(
    cache: KVCache, src: Integer[Any, "num_copies"], dst: Integer[Any, "num_copies"]
) -> KVCache[Array]:
    """Copies block `src[i]` to block `dst[i]`, all at once: every source is read as it was before.

    -1 copies nothing. Inside jit so does any other block outside the cache.

    Raises:
      InvalidInputError: wrong shapes or dtypes; outside jit also blocks outside the cache, or one
        block written twice.

    >>> cache = KVCache(*jnp.arange(6.0).reshape(2, 3, 1, 1, 1))
    >>> copy_blocks(cache, jnp.array([0, 1]), jnp.array([1, 2])).key.ravel().tolist()
    [0.0, 0.0, 1.0]
    """
    return swap_blocks(cache, cache, src, dst)


@takes_any_array
def swap_blocks(
    src_cache: KVCache,
    dst_cache: KVCache,
    src: Integer[Any, "num_copies"],
    dst: Integer[Any, "num_copies"],
) -> KVCache[Array]:
    """Copies block `src[i]` of one cache to block `dst[i]` of another, and returns the latter.

    It is a copy, not an exchange: the name is the usual one for moving blocks to the host and back.
    The caches and the ids may be on different devices. The caches must agree in all but
    `num_blocks`, in their scales too.

    Raises:
      InvalidInputError: as `copy_blocks`; or caches that do not agree.

    >>> from pagedattn import init_kv_cache
    >>> host, device = init_kv_cache(8, 2, 1, 4), init_kv_cache(4, 2, 1, 4)
    >>> host = swap_blocks(device, host, jnp.array([0, 3]), jnp.array([6, 7]))
    """
    validate.block_copies(src_cache, dst_cache, src, dst)
    sources, targets = src_cache.by_slot, dst_cache.by_slot
    copied = {name: _copy(sources[name], array, src, dst) for name, array in targets.items()}
    return replace(dst_cache, **copied)


@takes_any_array
@on_one_device
def fill_blocks(cache: KVCache, blocks: Integer[Any, "*n"], value: float = 0.0) -> KVCache[Array]:
    """Overwrites blocks with one value: zeros, or NaN to find who still reads them; -1 is skipped.

    A quantised cache holds the value as `write_kv` would write it.

    Raises:
      InvalidInputError: wrong shapes or dtypes; outside jit also blocks outside the cache.

    >>> cache = KVCache(*jnp.ones((2, 3, 1, 1, 1)))
    >>> fill_blocks(cache, jnp.array([1, -1])).key.ravel().tolist()
    [1.0, 0.0, 1.0]
    """
    validate.fill(cache, blocks, value)
    blocks = int32(blocks).ravel()
    dtype = cache.dtype if largest(cache.dtype) is None else jnp.float32
    shapes = ((len(blocks), *plane.shape[1:3], columns(plane)) for plane in cache.planes)
    return _set(cache, blocks, *(jnp.full(shape, value, dtype) for shape in shapes))


def move_slots(
    cache: KVCache, src: Integer[Array, "n"], dst: Integer[Array, "n"]
) -> KVCache[Array]:
    """Copies slot `src[i]` to slot `dst[i]`, all at once; -1 in either copies nothing."""
    dst, moved = jnp.where(src >= 0, dst, PAD_SLOT), {}
    for name, array in cache.by_slot.items():
        array = jnp.asarray(array)
        rows = array.reshape(-1, *array.shape[2:]).at[src].get(mode="clip")
        moved[name] = set_rows(array, dst, rows)
    return replace(cache, **moved)


def _set(cache, indices, *rows) -> KVCache:
    """Sets rows of the key and, if there is one, of the value; and the per-token scales."""
    rows = (None if new is None else jnp.asarray(new) for new in rows)
    made = held(cache, rows).items()
    return replace(
        cache, **{name: set_rows(getattr(cache, name), indices, new) for name, new in made}
    )


def _copy(src_plane, dst_plane, src, dst):
    src_plane, dst_plane = jnp.asarray(src_plane), jnp.asarray(dst_plane)
    src, dst = (_beside(int32(ids), src_plane) for ids in (src, dst))
    if not len(src_plane):
        return dst_plane
    blocks = src_plane.at[src].get(mode="clip")
    dst = jnp.where(in_range(src, len(src_plane)), dst, PAD_SLOT)
    return set_rows(dst_plane, *(_beside(array, dst_plane) for array in (dst, blocks)))


def _beside(array, other):
    """The array, moved to the device of the other; traced arrays stay where they are."""
    if isinstance(array, Tracer) or isinstance(other, Tracer) or array.devices() == other.devices():
        return array
    return jax.device_put(array, _whole(other.sharding))


def _whole(sharding):
    """A sharding of the same devices for arrays of any rank: each device has all of them."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding


def set_rows(
    array: Shaped[Any, "*shape"], indices: Integer[Any, "n"], rows: Shaped[Any, "n *row"]
) -> Shaped[Array, "*shape"]:
    """Sets rows of an array, leaving out those whose index is out of range.

    An index counts rows over all leading axes together: in a plane of the cache it is the number
    of a slot, or of a block, depending on the shape of a row.

    Works in place inside a jit that donates the array, with one exception: XLA:CPU computes
    bfloat16 in float32, and float8 in float16, so to set one row it rewrites the whole array,
    however large (jax-ml/jax#40101 is of that kind). There Numba's or torch's function runs
    instead, if one is installed that takes the dtype.
    """
    array, indices, rows = jnp.asarray(array), int32(indices), jnp.asarray(rows)
    if array.dtype.name in WIDENED and isinstance(array, Tracer) and device_of(array) == "cpu":
        for setter in _setters():
            with contextlib.suppress(UnsupportedError):  # the next one may take the dtype
                return _differentiable(setter)(array, indices, rows)
    return _scatter(array, indices, rows)


def _setters():
    return (import_module(module).set_rows for name, module in SETTERS.items() if can_load(name))


def _scatter(array, indices, rows):
    flat = array.reshape(-1, *rows.shape[1:])
    # unique_indices promises distinct indices: each row to drop gets a negative one of its own.
    nowhere = -1 - jnp.arange(len(indices), dtype=jnp.int32)
    indices = jnp.where(in_range(indices, len(flat)), indices, nowhere)
    return set_at(flat, indices, rows, unique_indices=True).reshape(array.shape)


def _differentiable(setter):
    @jax.custom_jvp
    def call(array, indices, rows):
        return setter(array, indices, rows)

    @call.defjvp
    def tangent(primals, tangents):
        array, indices, rows = primals
        d_array, _, d_rows = tangents
        return call(array, indices, rows), _scatter(d_array, indices, d_rows)

    return call

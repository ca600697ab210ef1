"""The facts of a layer's own arrays that a call depends on: shapes, dtypes, and how they lie."""

from typing import NamedTuple

from .facts import dtype_name
from .memory import is_fake
from .placement import device_of, strides_of


class Strides(NamedTuple):
    """How arrays lie in memory: elements from one index of an axis to the next, for each axis.

    value is empty where a latent cache has none.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]


class Layer(NamedTuple):
    """The facts of a layer's own arrays, the query and the cache, that a call depends on.

    value is the shape and dtype of the cache's value; None where a latent cache has none.
    """

    query_shape: tuple[int, ...]
    cache_shape: tuple[int, ...]
    value: tuple[tuple[int, ...], str] | None
    dtype: str
    device: str
    strides: Strides
    cache_dtype: str | None
    value_dim: int | None
    fake_tensors: bool


def layer_of(query, cache) -> Layer:
    """The facts of a layer's arrays, which may be traced."""
    dtype, cache_dtype = (dtype_name(array.dtype) for array in (query, cache.key))
    strides = *map(strides_of, (query, *cache.planes)), ()
    value = cache.value
    return Layer(
        query_shape=tuple(query.shape),
        cache_shape=tuple(cache.key.shape),
        value=None if value is None else (tuple(value.shape), dtype_name(value.dtype)),
        dtype=dtype,
        device=device_of(query),
        strides=Strides(*strides[:3]),
        cache_dtype=None if cache_dtype == dtype else cache_dtype,
        value_dim=value_dim_of(cache),
        fake_tensors=hasattr(query, "new_tensor") and any(map(is_fake, (query, *cache.planes))),
    )


def value_dim_of(cache) -> int | None:
    """The columns of the values; None where those are a plane like the keys."""
    if cache.value is None:
        return cache.value_dim
    value_dim = cache.value.shape[-1]
    return None if value_dim == cache.key.shape[-1] else value_dim

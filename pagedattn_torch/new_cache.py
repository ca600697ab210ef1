"""New caches of torch tensors, as `pagedattn` makes them of JAX arrays."""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from pagedattn import InvalidInputError, KVCache
from pagedattn._arrays.checks import count
from pagedattn._arrays.inspect import dtype_name, shown
from pagedattn.cache import validate
from pagedattn.cache.kv_cache import Scales, empty_cache

Number = Tensor | float | None


def init_kv_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype | str = torch.bfloat16,
    *,
    device: torch.device | str = "cpu",
    scales: Scales | None = None,
    key_scale: Number = None,
    value_scale: Number = None,
    value_dim: int | None = None,
) -> KVCache[Tensor]:
    """`pagedattn.init_kv_cache` on a device: the same arguments, a cache of zeros.

    Raises:
      InvalidInputError: as `pagedattn.init_kv_cache`, or torch cannot allocate it.

    >>> cache = init_kv_cache(4, 16, 2, 64, "int8", scales="token")
    >>> cache.key.shape, cache.key_scale.shape
    (torch.Size([4, 16, 2, 64]), torch.Size([4, 16, 2]))
    """
    shape = validate.cache_shape((num_blocks, block_size, num_kv_heads, head_dim), dtype)
    value_dim = shape[3] if value_dim is None else count("value_dim", value_dim)
    full = functools.partial(_full, device)
    given = [_scale(scale, device) for scale in (key_scale, value_scale)]
    cache = empty_cache(full, (shape, (*shape[:3], value_dim)), dtype, scales, given)
    validate.kv_cache(cache)
    return cache


def init_latent_cache(
    num_blocks: int,
    block_size: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype | str = torch.bfloat16,
    *,
    device: torch.device | str = "cpu",
    num_kv_heads: int = 1,
    scales: Scales | None = None,
    key_scale: Number = None,
) -> KVCache[Tensor]:
    """`pagedattn.init_latent_cache` on a device: one array, whose first columns are the values.

    Raises:
      InvalidInputError: as `pagedattn.init_latent_cache`, or torch cannot allocate it.

    >>> init_latent_cache(4, 16, 576, 512, torch.float8_e4m3fn, scales="token").key_scale.shape
    torch.Size([4, 16, 1])
    """
    shape = validate.cache_shape((num_blocks, block_size, num_kv_heads, head_dim), dtype)
    full, given = functools.partial(_full, device), [_scale(key_scale, device)]
    cache = empty_cache(full, (shape,), dtype, scales, given)
    cache = dataclasses.replace(cache, value_dim=count("value_dim", value_dim))
    validate.kv_cache(cache)
    return cache


def _scale(scale: Number, device) -> Any:
    return _full(device, (), scale, "float32") if isinstance(scale, float | int) else scale


def _full(device, shape, number, dtype) -> Tensor:
    try:
        return torch.full(shape, number, dtype=getattr(torch, dtype_name(dtype)), device=device)
    except Exception as error:  # torch raises many kinds for a bad dtype or device
        raise InvalidInputError(
            f"torch cannot allocate {shape} of dtype {shown(dtype)} on {shown(device)}: {error}"
        ) from error

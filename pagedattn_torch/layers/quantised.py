"""Quantised caches of layers: what engines call their dtypes, and the scales of a call."""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pagedattn import InvalidInputError, KVCache, UnsupportedError
from pagedattn._arrays.checks import whole
from pagedattn._arrays.inspect import shown
from pagedattn._arrays.memory import is_fake, require_memory
from pagedattn._dispatch.registry import Framework, record
from pagedattn.cache.quantise import held

from ..arrays import require_tensors

DTYPES = {
    "auto": None,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}


def cache_dtype(name) -> torch.dtype | None:
    """The dtype of an engine's `kv_cache_dtype`; None is that of the keys."""
    if not isinstance(name, str) or name not in DTYPES:
        raise UnsupportedError(f"kv_cache_dtype must be one of {[*DTYPES]}, got {shown(name)}")
    return DTYPES[name]


def require_quantised(backend: str) -> None:
    """Requires a backend that reads quantised caches, by what it declares."""
    if "cache_dtype" not in record(backend, Framework.TORCH).supports:
        raise UnsupportedError(
            f"kv_cache_dtype must be 'auto' for layers of {backend!r}, which reads no quantised "
            "cache; XFormersImpl and TorchSDPABackendImpl do"
        )


def as_quantised(cache: KVCache, dtype: torch.dtype, k_scale, v_scale) -> KVCache:
    """A layer's cache with its scales; engines allocate bytes where torch has no such dtype.

    Raises:
      InvalidInputError: a cache of another dtype, or no scale.
    """
    if cache.key.dtype not in (dtype, torch.uint8):
        raise InvalidInputError(
            f"kv_cache must be {dtype} or torch.uint8, by kv_cache_dtype, got {cache.key.dtype}"
        )
    device = cache.key.device
    key, value = (plane.view(dtype) for plane in cache.planes)
    scales = (_scale("k_scale", k_scale, device), _scale("v_scale", v_scale, device))
    return KVCache(key, value, *scales)


def like_cache(packed: KVCache, cache: KVCache | None) -> KVCache:
    """New keys and values rounded as the cache will hold them.

    So a result does not depend on whether new keys are read as they are given or from the cache.
    """
    if cache is None or cache.dtype is packed.dtype:
        return packed
    return replace(cache, **held(cache, packed.planes))


def _scale(name, scale, device) -> Tensor:
    if isinstance(scale, Tensor):
        require_tensors(**{name: scale})
    if isinstance(scale, Tensor) and scale.device == device:
        return scale.reshape(()) if scale.numel() == 1 else scale
    if isinstance(scale, Tensor):
        one = scale.device.type == "cpu" and scale.numel() == 1
        if not one:
            raise InvalidInputError(
                f"{name} must lie on the cache's {device}, got a tensor on {scale.device}"
            )
        require_memory(name, scale)
        scale = scale.item()
    if whole(scale) is None and not isinstance(scale, float | int | np.floating):
        raise InvalidInputError(f"{name} must be a number or a tensor, got {shown(scale)}")
    if not 0 < scale < math.inf:
        raise InvalidInputError(f"{name} must be positive and finite, got {scale}")
    return _on_device(float(scale), device)


_kept: dict[tuple[float, torch.device], Tensor] = {}


def _on_device(scale: float, device: torch.device) -> Tensor:
    """A scale on a device, made once: copying it to a GPU waits, and no CUDA graph may do so."""
    if (made := _kept.get((scale, device))) is None:
        made = torch.tensor(scale, dtype=torch.float32, device=device)
        if not is_fake(made):  # as where torch.export calls: later ones could not read it
            _kept[scale, device] = made
    return made

"""How a layer's cache lies in memory.

A layer's kv_cache is one tensor `[2, num_blocks, block_size, num_kv_heads, head_size]`: plane 0
holds the keys, plane 1 the values. `[2, num_blocks, block_size * num_kv_heads * head_size]` is the
same memory seen flat.

The order of the axes in memory is another matter: see `empty_kv_cache`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pagedattn import InvalidInputError, KVCache
from pagedattn._arrays.checks import count
from pagedattn._arrays.inspect import shown
from pagedattn.batch import validate as validate_batch
from pagedattn.cache import validate as validate_cache

from .arrays import require_cache, require_tensors


def kv_cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
) -> tuple[int, ...]:
    """The shape of one layer's cache.

    Raises:
      InvalidInputError: a size is no integer above 0, or there are more slots than int32 counts.

    >>> kv_cache_shape(8, 16, 2, 64)
    (2, 8, 16, 2, 64)
    """
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    return (2, *validate_cache.cache_shape(shape, torch.float32))  # of any dtype


def empty_kv_cache(
    shape: Sequence[int],
    stride_order: Sequence[int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> Tensor:
    """An uninitialised cache of a shape, with its axes in a given order in memory.

    Args:
      shape: `kv_cache_shape(...)`.
      stride_order: the axes of the shape, outermost in memory first: a backend's
        `get_kv_cache_stride_order()`.

    Raises:
      InvalidInputError: stride_order does not hold each axis once, or torch cannot allocate it.

    >>> cache = empty_kv_cache(kv_cache_shape(8, 16, 2, 64), (0, 1, 3, 2, 4))
    >>> cache.shape, cache[0].transpose(1, 2).is_contiguous()
    (torch.Size([2, 8, 16, 2, 64]), True)
    """
    shape, stride_order = _counts("shape", shape), _counts("stride_order", stride_order)
    if sorted(stride_order) != list(range(len(shape))):
        raise InvalidInputError(
            f"stride_order must hold each of the {len(shape)} axes once, got {tuple(stride_order)}"
        )
    try:
        held = torch.empty([shape[axis] for axis in stride_order], dtype=dtype, device=device)
    except Exception as error:  # torch raises many kinds for a bad dtype or device
        raise InvalidInputError(
            f"torch cannot allocate {shape} of dtype {shown(dtype)} on {shown(device)}: {error}"
        ) from error
    return held.permute([stride_order.index(axis) for axis in range(len(shape))])


def split_kv_cache(kv_cache: Tensor | KVCache, num_kv_heads: int, head_size: int) -> KVCache:
    """A layer's cache as views of its keys and of its values; writing to these writes to it.

    Args:
      kv_cache: `[2, num_blocks, block_size, num_kv_heads, head_size]`, or flat with the last three
        axes as one; a KVCache is given back as it is.

    Raises:
      InvalidInputError: another shape, or a flat cache with gaps in its memory.

    >>> split_kv_cache(torch.zeros(2, 8, 16 * 2 * 64), num_kv_heads=2, head_size=64).block_size
    16
    """
    num_kv_heads = count("num_kv_heads", num_kv_heads)
    head_size = count("head_size", head_size)
    _require_kv_cache(kv_cache)
    return split_heads(kv_cache, num_kv_heads, head_size)


def split_heads(kv_cache: Tensor | KVCache, num_kv_heads: int, head_size: int) -> KVCache:
    """`split_kv_cache` of tensors and sizes that are known to be such."""
    cache = kv_cache if isinstance(kv_cache, KVCache) else _split(kv_cache, num_kv_heads, head_size)
    sizes = (num_kv_heads, head_size)
    if cache.value is None or not cache.key.shape[2:] == cache.value.shape[2:] == sizes:
        raise _unlike(kv_cache, num_kv_heads, head_size)
    return cache


def planes(kv_cache: Tensor | KVCache) -> KVCache:
    """Keys and values of a cache whose head count is not known, for copying whole blocks.

    From a flat cache the blocks are `[num_blocks, 1, 1, size]`.
    """
    _require_kv_cache(kv_cache)
    if isinstance(kv_cache, KVCache):
        return kv_cache
    if kv_cache.ndim not in (3, 5) or len(kv_cache) != 2:
        raise _unlike(kv_cache)
    if kv_cache.dtype is torch.uint8:  # quantised keys and values, of whatever kind
        kv_cache = kv_cache.view(torch.int8)
    key, value = kv_cache.unbind(0)
    return (
        KVCache(key, value) if key.ndim == 4 else KVCache(key[:, None, None], value[:, None, None])
    )


def _counts(name, values) -> list[int]:
    """Integers of at least 0."""
    return validate_batch.lengths(name, values).tolist()


def _require_kv_cache(kv_cache):
    if isinstance(kv_cache, KVCache):
        require_cache(kv_cache)
    else:
        require_tensors(kv_cache=kv_cache)


def _split(kv_cache, num_kv_heads, head_size):
    if kv_cache.ndim == 5 and kv_cache.shape[0] == 2:
        return KVCache(*kv_cache.unbind(0))
    if (
        kv_cache.ndim != 3
        or kv_cache.shape[0] != 2
        or kv_cache.shape[2] % (num_kv_heads * head_size)
    ):
        raise _unlike(kv_cache, num_kv_heads, head_size)
    if not kv_cache.is_contiguous():
        raise InvalidInputError(
            f"a flat kv_cache must be contiguous, got strides {kv_cache.stride()}"
        )
    shape = (2, kv_cache.shape[1], -1, num_kv_heads, head_size)
    return KVCache(*kv_cache.view(shape).unbind(0))


def _unlike(kv_cache, num_kv_heads: Any = "num_kv_heads", head_size: Any = "head_size"):
    held = kv_cache.planes if isinstance(kv_cache, KVCache) else (kv_cache,)
    return InvalidInputError(
        f"kv_cache must be [2, num_blocks, block_size, {num_kv_heads}, {head_size}], or [2, "
        f"num_blocks, block_size * {num_kv_heads} * {head_size}], got "
        + " and ".join(str(list(plane.shape)) for plane in held)
    )


def is_empty(kv_cache: Tensor | KVCache | None) -> bool:
    """Whether there is no cache: None, or a tensor without elements, as in a profiling run."""
    if kv_cache is None:
        return True
    _require_kv_cache(kv_cache)
    return 0 in (kv_cache.key if isinstance(kv_cache, KVCache) else kv_cache).shape


PACK_BYTES = 16  # bytes of one key that a group of threads reads at once
DENSE = torch.contiguous_format


def pack_keys(
    keys: Float[Tensor, "num_blocks block_size num_kv_heads head_size"],
) -> Float[Tensor, "num_blocks num_kv_heads groups block_size x"]:
    """Keys in the packed layout: `x = 16 // itemsize` dimensions of a token are adjacent.

    Token t, dimension d of a block is at `[:, :, d // x, t, d % x]`. Returns a new tensor;
    `unpack_keys` is the inverse.

    Raises:
      InvalidInputError: not a tensor of four dimensions, or head_size is no multiple of x.

    >>> pack_keys(torch.zeros(4, 16, 2, 64, dtype=torch.bfloat16)).shape
    torch.Size([4, 2, 8, 16, 8])
    """
    _require_rank(4, keys=keys)
    x = PACK_BYTES // keys.element_size()
    if keys.shape[-1] % x:
        raise InvalidInputError(
            f"head_size must be a multiple of {x} to pack {keys.dtype} keys, got {keys.shape[-1]}"
        )
    return keys.unflatten(3, (-1, x)).permute(0, 2, 3, 1, 4).clone(memory_format=DENSE)


def unpack_keys(
    packed: Float[Tensor, "num_blocks num_kv_heads groups block_size x"],
) -> Float[Tensor, "num_blocks block_size num_kv_heads head_size"]:
    """The inverse of `pack_keys`.

    Raises:
      InvalidInputError: not a tensor of five dimensions.

    >>> keys = torch.arange(16.0).reshape(1, 2, 1, 8)
    >>> torch.equal(unpack_keys(pack_keys(keys)), keys)
    True
    """
    _require_rank(5, packed=packed)
    return packed.permute(0, 3, 1, 2, 4).flatten(3).clone(memory_format=DENSE)


def pack_values(
    values: Float[Tensor, "num_blocks block_size num_kv_heads head_size"],
) -> Float[Tensor, "num_blocks num_kv_heads head_size block_size"]:
    """Values in the packed layout, as a new tensor: the tokens of a block are innermost.

    `unpack_values` is the inverse.

    Raises:
      InvalidInputError: not a tensor of four dimensions.

    >>> pack_values(torch.zeros(4, 16, 2, 64)).shape
    torch.Size([4, 2, 64, 16])
    """
    _require_rank(4, values=values)
    return values.permute(0, 2, 3, 1).clone(memory_format=DENSE)


def unpack_values(
    packed: Float[Tensor, "num_blocks num_kv_heads head_size block_size"],
) -> Float[Tensor, "num_blocks block_size num_kv_heads head_size"]:
    """The inverse of `pack_values`.

    Raises:
      InvalidInputError: not a tensor of four dimensions.

    >>> values = torch.arange(16.0).reshape(1, 2, 1, 8)
    >>> torch.equal(unpack_values(pack_values(values)), values)
    True
    """
    _require_rank(4, packed=packed)
    return packed.permute(0, 3, 1, 2).clone(memory_format=DENSE)


def _require_rank(ndim, **tensors) -> None:
    require_tensors(**tensors)
    for name, tensor in tensors.items():
        got = list(tensor.shape)
        if tensor.ndim != ndim:
            raise InvalidInputError(f"{name} must be of {ndim} dimensions, got {got}")

"""The packed form of a cache's keys and values, which some kernels want."""

import torch
from jaxtyping import Float
from torch import Tensor

from pagedattn import InvalidInputError
from pagedattn.checks import require

from .arrays import require_tensors

PACK_BYTES = 16  # bytes of one key that a group of threads reads at once
DENSE = torch.contiguous_format


def pack_keys(
    keys: Float[Tensor, "num_blocks block_size num_kv_heads head_size"],
) -> Float[Tensor, "num_blocks num_kv_heads groups block_size x"]:
    """Keys in the packed layout: `x = 16 // itemsize` dimensions of a token lie side by side.

    Token t, dimension d of a block stands at `[:, :, d // x, t, d % x]`. Returns a new tensor;
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
        require(tensor.ndim == ndim, f"{name} must be of {ndim} dimensions, got {got}")

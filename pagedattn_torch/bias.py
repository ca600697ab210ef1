"""Additive biases on any torch device, made without waiting for the device."""

import functools

import torch
from jaxtyping import Float32, Integer
from torch import Tensor

from pagedattn.ragged import cdiv
from pagedattn.visibility import alibi_bias

ALIGNMENT = 16  # elements: rows of a bias start at multiples of this in memory


def alibi(
    query_positions: Integer[Tensor, "*#n q"],
    key_positions: Integer[Tensor, "*#n k"],
    slopes: tuple[float, ...],
) -> Float32[Tensor, "*m num_heads q k"]:
    """`pagedattn.alibi_bias` on the device of the positions: float32 `[..., num_heads, q, k]`."""
    return alibi_bias(query_positions, key_positions, slopes_on(slopes, query_positions.device))


def aligned(added: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias in the queries' dtype and with aligned rows: CUTLASS loads no other."""
    num_keys = added.shape[-1]
    width = cdiv(num_keys, ALIGNMENT) * ALIGNMENT
    room = added.new_empty((*added.shape[:-1], width), dtype=dtype)[..., :num_keys]
    return room.copy_(added)


def exact_dtype(query: Tensor, slopes: tuple[float, ...] | None) -> torch.dtype:
    """A dtype in which the bias is exact: any holds a mask (0, -inf); ALiBi needs float32."""
    return query.dtype if slopes is None else torch.float32


@functools.cache
def slopes_on(slopes: tuple[float, ...], device: torch.device) -> Float32[Tensor, "num_heads"]:
    """Slopes on a device, float32; made once, and kept as long as the process lives.

    Copying them to a GPU waits for it, so that cannot happen while a CUDA graph is captured. And a
    captured graph goes on reading this memory whenever it is replayed.
    """
    return torch.tensor(slopes, dtype=torch.float32, device=device)

"""Biases on any torch device, without waiting for it."""

import functools

import torch
from torch import Tensor

from pagedattn.ragged import cdiv
from pagedattn.visibility import alibi_bias

ALIGNMENT = 16  # elements a row of a bias is a multiple of, in memory


def alibi(query_positions: Tensor, key_positions: Tensor, slopes: tuple[float, ...]) -> Tensor:
    """`pagedattn.alibi_bias` where the positions are: `[..., num_heads, q, k]`."""
    return alibi_bias(query_positions, key_positions, slopes_on(slopes, query_positions.device))


def aligned(added: Tensor, dtype: torch.dtype) -> Tensor:
    """A bias in the dtype of the queries, which CUTLASS wants, with rows where it can load them."""
    num_keys = added.shape[-1]
    width = cdiv(num_keys, ALIGNMENT) * ALIGNMENT
    room = added.new_empty((*added.shape[:-1], width), dtype=dtype)[..., :num_keys]
    return room.copy_(added)


def exact_dtype(query: Tensor, slopes: tuple[float, ...] | None) -> torch.dtype:
    """The dtype in which the bias is exact: a mask is in any, distances are in float32."""
    return query.dtype if slopes is None else torch.float32


@functools.cache
def slopes_on(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    """Slopes on a device, float32; kept for good.

    A copy to a GPU waits for it and cannot be part of a CUDA graph, and a graph replays with the
    memory that it captured.
    """
    return torch.tensor(slopes, dtype=torch.float32, device=device)

"""Biases on any torch device, without waiting for it."""

import functools

import torch
from jaxtyping import Float, Float32, Integer
from torch import Tensor

from pagedattn.ragged import cdiv
from pagedattn.visibility import alibi_bias

ALIGNMENT = 16  # elements a row of a bias is a multiple of, in memory


def alibi(
    query_positions: Integer[Tensor, "*#n q"],
    key_positions: Integer[Tensor, "*#n k"],
    slopes: tuple[float, ...],
) -> Float32[Tensor, "*m num_heads q k"]:
    """`pagedattn.alibi_bias` where the positions are."""
    return alibi_bias(query_positions, key_positions, slopes_on(slopes, query_positions.device))


def aligned(
    added: Float[Tensor, "*rows num_keys"], dtype: torch.dtype
) -> Float[Tensor, "*rows num_keys"]:
    """A bias in the dtype of the queries, which CUTLASS wants, with rows where it can load them."""
    num_keys = added.shape[-1]
    width = cdiv(num_keys, ALIGNMENT) * ALIGNMENT
    room = added.new_empty((*added.shape[:-1], width), dtype=dtype)[..., :num_keys]
    return room.copy_(added)


def exact_dtype(query: Tensor, slopes: tuple[float, ...] | None) -> torch.dtype:
    """The dtype in which the bias is exact: a mask is in any, distances are in float32."""
    return query.dtype if slopes is None else torch.float32


@functools.cache
def slopes_on(slopes: tuple[float, ...], device: torch.device) -> Float32[Tensor, "num_heads"]:
    """Slopes on a device; kept for good.

    A copy to a GPU waits for it and cannot be part of a CUDA graph, and a graph replays with the
    memory that it captured.
    """
    return torch.tensor(slopes, dtype=torch.float32, device=device)

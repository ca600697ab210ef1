"""Additive biases on any torch device, made without waiting for the device."""

import torch
from jaxtyping import Float, Float32, Integer
from torch import Tensor

from pagedattn._arrays.namespace import cdiv, wide_dtype
from pagedattn._dispatch.call import Call
from pagedattn.masks import alibi_bias

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


def exact_dtype(query: Tensor, call: Call) -> torch.dtype:
    """A dtype in which a bias is exact: any holds a mask (0, -inf), other sums need float32."""
    return torch.float32 if call.adds_to_logits else query.dtype


def zeroed(
    plane: Float[Tensor, "size kv_heads keys head_dim"],
    added: Float[Tensor, "size one_or_kv_heads rows keys"],
) -> Float[Tensor, "size kv_heads keys head_dim"]:
    """Keys or values, with 0 for those that a bias hides from all rows: NaN outlives a weight of 0.

    Without a bias no such key is gathered.
    """
    return plane.masked_fill((added == -torch.inf).all(2)[..., None], 0)


def bias_at(
    bias: Float[Tensor, "num_tokens heads max_keys"],
    tokens: Integer[Tensor, "size q"],
    positions: Integer[Tensor, "size k"],
) -> Float[Tensor, "size heads q k"]:
    """The bias of the tokens at the positions of keys of their sequences, at least float32.

    -inf for tokens out of range, which are padding, and for keys past its last column.
    """
    num_tokens, _, max_keys = bias.shape
    rows = tokens.clamp(0, num_tokens - 1)[:, :, None]
    values = bias[rows, :, positions.clamp(0, max_keys - 1)[:, None]].permute(0, 3, 1, 2)
    values = values.to(wide_dtype(bias))
    outside = ((tokens < 0) | (tokens >= num_tokens))[:, :, None] | (positions >= max_keys)[:, None]
    return values.masked_fill(outside[:, None], -torch.inf)


def slopes_on(slopes: tuple[float, ...], device: torch.device) -> Float32[Tensor, "num_heads"]:
    """Slopes on a device, float32; made by kernels that take them as arguments.

    A copy from the host would wait for a GPU, and is an error while a CUDA graph is captured, as
    XLA may do at the first call.
    """
    made = torch.zeros(len(slopes), dtype=torch.float32, device=device)
    # As torch's optimizers do: dozens of numbers are arguments of one kernel.
    torch._foreach_add_(made.unbind(), slopes)  # pyright: ignore[reportPrivateImportUsage]
    return made

"""Attention of a padded batch, as transformers' models hand it to their attention function."""

import torch
from torch import Tensor

from pagedattn import UnsupportedError

from ..attention import ragged_attention
from .options import spec_of
from .rows import Mask, Rows, rows_of


def attend_padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    backend: str | None,
    batch_invariant: bool,
) -> Tensor:
    """out `[batch, q_length, num_heads, value_dim]` of `[batch, heads, length, head_dim]`.

    What is no real token is left out before, and stands as zeros in the result.
    """
    if not (mask is None or isinstance(mask, Mask)):
        raise UnsupportedError(
            f"pagedattn takes masks of two dimensions (1 for tokens, 0 for padding), got "
            f"{list(mask.shape)}: set_attn_implementation('sdpa') takes this one"
        )
    rows = mask.rows if mask is not None else _without_padding(query, key, causal, sliding_window)
    out = ragged_attention(
        _packed(query, rows.queries),
        _packed(key, rows.keys),
        _packed(value, rows.keys),
        rows.query_starts,
        rows.key_starts,
        spec_of(scaling, rows.causal, rows.window, softcap),
        max_query_len=rows.max_query_len,
        max_key_len=rows.max_key_len,
        backend=backend,
        batch_invariant=batch_invariant,
        sinks=sinks,
    )
    batch, _, length, _ = query.shape
    padded = out.new_zeros(batch * length, *out.shape[1:])
    return padded.index_copy_(0, rows.queries, out).unflatten(0, (batch, length))


def _without_padding(query: Tensor, key: Tensor, causal: bool, window: int | None) -> Rows:
    new = {"dtype": torch.bool, "device": key.device}
    queries, keys = (torch.ones(len(x), x.shape[2], **new) for x in (query, key))
    return rows_of(queries, keys, causal, window)


def _packed(heads: Tensor, tokens: Tensor) -> Tensor:
    """`[num_tokens, heads, head_dim]` of the real tokens of `[batch, heads, length, head_dim]`."""
    return heads.transpose(1, 2).flatten(0, 1)[tokens]

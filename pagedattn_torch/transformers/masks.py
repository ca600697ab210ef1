"""What transformers' masks say, in lengths: which tokens are real, and what each of them sees."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from pagedattn import AttentionSpec, UnsupportedError
from pagedattn.visibility import visible_mask


@dataclass(frozen=True, eq=False)
class Rows:
    """A padded batch of one forward pass, worked out once for all layers.

    Fields:
      queries, keys: the indices of the real tokens, with the batch's axes flattened.
      query_starts, key_starts: sequence s has the real tokens from entry s up to entry s + 1.
      max_query_len, max_key_len: the padded lengths.
      causal, window: what the mask shows, of the tokens that are real.
    """

    queries: Tensor
    keys: Tensor
    query_starts: Tensor
    key_starts: Tensor
    max_query_len: int
    max_key_len: int
    causal: bool
    window: int | None


def rows_of(queries: Tensor, keys: Tensor, causal: bool, window: int | None) -> Rows:
    """The rows of a batch whose real tokens are marked, bool `[batch, length]` of both."""
    return Rows(
        queries=queries.flatten().nonzero()[:, 0],
        keys=keys.flatten().nonzero()[:, 0],
        query_starts=_starts(queries),
        key_starts=_starts(keys),
        max_query_len=queries.shape[1],
        max_key_len=keys.shape[1],
        causal=causal,
        window=window,
    )


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    use_vmap: bool = False,
    **_: Any,
) -> Rows:
    """transformers' mask interface: the rows of a mask that padding, causality and a window make.

    Raises:
      UnsupportedError: the mask shows something else, as with packed sequences, chunks or blocks.
    """
    sizes = {"q_offset": int(q_offset), "kv_offset": kv_offset, "local_size": local_size}
    shown: Any = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        device=device,
        use_vmap=use_vmap,
        **sizes,
    )
    real = _real(attention_mask, batch_size, kv_offset, kv_length, device)
    if _shows_all(shown, real):  # the keys may be an encoder's, and say nothing of the queries
        return rows_of(real.new_ones(batch_size, q_length), real, False, None)
    if kv_offset + kv_length != int(q_offset) + q_length or q_length > kv_length:
        raise UnsupportedError(
            f"pagedattn needs a cache that ends with the new tokens, got {kv_length} keys from "
            f"{kv_offset} on and {q_length} queries from {int(q_offset)} on: a static cache has "
            "empty places behind them, use a dynamic one"
        )
    fresh = real[:, kv_length - q_length :]
    for causal in (True, False):
        for window in (None, local_size) if local_size else (None,):
            if _same(shown, real, fresh, AttentionSpec(causal=causal, sliding_window=window)):
                return rows_of(fresh, real, causal, window)
    raise UnsupportedError(
        "pagedattn has masks of padding, causality and a sliding window alone, and this one shows "
        "something else (packed sequences, chunks, blocks of images, ...): "
        "set_attn_implementation('sdpa') runs this model"
    )


def _real(attention_mask, batch_size: int, offset: int, length: int, device) -> Tensor:
    """Which keys are tokens and no padding, bool `[batch_size, length]`."""
    if attention_mask is None:
        return torch.ones(batch_size, length, dtype=torch.bool, device=device)
    return attention_mask[:, offset : offset + length].to(torch.bool)


def _shows_all(shown: Tensor, real: Tensor) -> bool:
    """Whether a mask shows all real keys to every query, as to a decoder's of an encoder's."""
    return shown.shape[3] == real.shape[1] and bool((shown[:, 0] == real[:, None]).all())


def _same(shown: Tensor, real: Tensor, fresh: Tensor, spec: AttentionSpec) -> bool:
    """Whether a mask shows to every real query what causality and a window show of the keys."""
    keys = torch.arange(real.shape[1], device=real.device)
    seen = visible_mask(keys[len(keys) - fresh.shape[1] :], keys, spec) & real[:, None]
    return bool(((shown[:, 0] & fresh[:, :, None]) == (seen & fresh[:, :, None])).all())


def _starts(real: Tensor) -> Tensor:
    ends = real.sum(1).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends]).to(torch.int32)

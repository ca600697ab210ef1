"""What transformers' masks say, in lengths: which tokens are real, and what each of them sees."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.masking_utils import causal_mask_function, sdpa_mask

from pagedattn import AttentionSpec, UnsupportedError
from pagedattn.masks import visible_mask

from ..uncompiled import uncompiled
from .rows import Mask, Rows, rows_of


@uncompiled
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
) -> Mask:
    """transformers' mask interface: the rows of a mask that padding, causality and a window make.

    A static cache has empty places behind the new tokens, which are left out as padding is.

    Raises:
      UnsupportedError: the mask shows something else, as with packed sequences, chunks or blocks.
    """
    start = int(q_offset)
    sizes: dict[str, Any] = {"q_length": q_length, "kv_length": kv_length, "q_offset": start}
    shown: Any = sdpa_mask(
        batch_size=batch_size,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        device=device,
        use_vmap=use_vmap,
        **sizes,
    )
    shown = shown[:, 0]
    if (shown == shown[:, :1]).all():  # keys of an encoder, or the only query's
        return Mask(rows_of(shown.new_ones(batch_size, q_length), shown[:, 0], False, None))
    queries = torch.arange(start, start + q_length, device=device)
    keys = torch.arange(kv_offset, kv_offset + kv_length, device=device)
    real = _real(attention_mask, batch_size, keys) & (keys <= queries[-1])
    return Mask(_rows(shown, real, queries, keys, local_size))


def _rows(shown: Tensor, real: Tensor, queries: Tensor, keys: Tensor, size: int | None) -> Rows:
    """The rows of a mask bool `[batch, q_length, kv_length]` of which these tokens are real."""
    own = torch.isin(keys, queries)
    if int(own.sum()) == len(queries):
        fresh = real[:, own]
        for spec in _specs(size, real):
            expected = visible_mask(queries, keys, spec) & real[:, None]
            if not ((shown != expected) & fresh[:, :, None]).any():
                return rows_of(fresh, real, spec.causal, spec.sliding_window)
    raise UnsupportedError(
        "pagedattn has masks of padding, causality and a sliding window alone, and this one shows "
        "something else (packed sequences, chunks, blocks of images, a window over padding between "
        "tokens, ...): set_attn_implementation('sdpa') runs this model"
    )


def _specs(size: int | None, real: Tensor) -> Iterator[AttentionSpec]:
    """What a mask with a window of this size may show."""
    # Padding between tokens is left out, and with it they are nearer to each other than they were.
    windows = [] if size is None or _is_broken(real) else [size, size + 1]
    for causal in (True, False):
        yield AttentionSpec(causal=causal)
        # transformers counts the token itself among the size of causal windows, and leaves it out
        # of most symmetric ones.
        for window in windows[:1] if causal else windows:
            yield AttentionSpec(causal=causal, sliding_window=window)


def _real(attention_mask: Tensor | None, batch_size: int, keys: Tensor) -> Tensor:
    """Which keys are tokens and no padding, bool `[batch_size, num_keys]`."""
    if attention_mask is None:
        return keys.new_ones(batch_size, len(keys), dtype=torch.bool)
    missing = int(keys[-1]) + 1 - attention_mask.shape[1]
    return pad(attention_mask, (0, max(missing, 0)))[:, keys].to(torch.bool)


def _is_broken(real: Tensor) -> bool:
    """Whether any sequence has padding between its tokens: more than one first token."""
    first = real & ~pad(real, (1, -1))
    return bool((first.sum(1) > 1).any())

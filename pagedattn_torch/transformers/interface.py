"""The calls of users: attention of a model by this library, dense and over pages."""

import functools
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from pagedattn import UnsupportedError

from .masks import mask
from .options import require_positions, require_supported, spec_of
from .padded import attend_padded
from .paged import attend_paged
from .requirements import require_interface, require_version

NAME = "pagedattn"
# Continuous batching builds no dense mask for an implementation that has this word in its name.
PAGED_NAME = "pagedattn_flash"


def use(
    model: PreTrainedModel, *, backend: str | None = None, batch_invariant: bool = False
) -> None:
    """Makes a model attend by this library; `model.set_attn_implementation("sdpa")` undoes it.

    Padding on either side, dynamic and static caches, sliding windows, soft-caps, sinks, grouped
    heads, values of another width than keys, encoders and cross-attention are computed. Under a
    causal mask padding costs nothing, and gets zeros. Everything else that changes the result is
    refused by name.

    Args:
      backend, batch_invariant: as in `pagedattn_torch.paged_attention`.

    Raises:
      UnsupportedError: the model computes its attention by itself, as Falcon, Bloom, MPT and GPT-J
        do. Calls of the model raise it for training, biases, other masks, and what the backend
        refuses.

    >>> import torch, transformers
    >>> config = transformers.LlamaConfig(vocab_size=31, hidden_size=32, intermediate_size=32,
    ...     num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    >>> model = transformers.LlamaForCausalLM(config).eval()
    >>> use(model)
    >>> with torch.no_grad():
    ...     model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 31])
    """
    require_interface(model)
    model.set_attn_implementation(register(backend=backend, batch_invariant=batch_invariant))


def register(*, backend: str | None = None, batch_invariant: bool = False) -> str:
    """Registers attention by this library with transformers; returns the name.

    For `attn_implementation="pagedattn"` when a model is loaded; with options it is another name,
    for each of their values. A model that computes its
    attention by itself goes on to do so: `use` refuses it, and `model.set_attn_implementation` only
    logs a warning.

    Args:
      backend, batch_invariant: as in `pagedattn_torch.paged_attention`.

    >>> register()
    'pagedattn'
    """
    return _registered(NAME, attend, mask, backend=backend, batch_invariant=batch_invariant)


def use_pages(
    model: PreTrainedModel, *, backend: str | None = None, batch_invariant: bool = False
) -> None:
    """Makes continuous batching of a model (`generate_batch`, ...) read its pages in place.

    transformers' own ways on a CPU gather the keys of a batch for every layer, and mask out those
    of all other sequences. Layers with a sliding window keep their tokens in a ring: their keys
    are still gathered, and not masked. `model.set_attn_implementation` undoes it.

    Args:
      backend, batch_invariant: as in `pagedattn_torch.paged_attention`.

    Raises:
      BackendUnavailableError: transformers is older than 5.19, which has other pages.
      UnsupportedError: the model computes its attention by itself, as in `use`.
    """
    require_version("5.19", "use_pages")
    require_interface(model)
    options = {"backend": backend, "batch_invariant": batch_invariant}
    # Not by set_attn_implementation: the word in the name would make it look for a flash kernel.
    name = _registered(PAGED_NAME, attend_in_pages, no_mask, **options)
    model.config._attn_implementation = name


def _registered(name: str, function: Callable, make_mask: Callable, **options: Any) -> str:
    """Registers a function with some options, by a name that no others have: models share it."""
    name += _suffix(*options.values())
    AttentionInterface.register(name, partial(function, **options))
    AttentionMaskInterface.register(name, make_mask)
    return name


@functools.cache
def _suffix(backend: str | None, batch_invariant: bool) -> str:
    """Of options that are not the defaults a number: transformers looks for words in names."""
    return f"_{next(_numbers)}" if backend is not None or batch_invariant else ""


_numbers = itertools.count(1)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    backend: str | None = None,
    batch_invariant: bool = False,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: `[batch, heads, length, head_dim]` in,
    `[batch, length, heads, head_dim]` out, and no weights."""
    require_supported(module, dropout, options)
    require_positions(batch_invariant, sliding_window)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = attend_padded(
        query,
        key,
        value,
        attention_mask,
        causal=causal,
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=_values(s_aux),
        backend=backend,
        batch_invariant=batch_invariant,
    )
    return out, None


def attend_in_pages(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: PagedAttentionCache | None = None,
    *,
    backend: str | None = None,
    batch_invariant: bool = False,
    **step: Any,
) -> tuple[Tensor, None]:
    """The attention function of continuous batching; `step` is the engine's, alike for all layers.

    Raises:
      UnsupportedError: it is called outside of continuous batching, or as `attend` does.
    """
    require_supported(module, dropout, step)
    require_positions(batch_invariant, sliding_window)
    if cache is None:
        raise UnsupportedError(
            "use_pages is for continuous batching (generate_batch, ...), and this call brings no "
            "pages: pagedattn_torch.transformers.use(model) is for generate and forward"
        )
    spec = spec_of(scaling, is_causal, sliding_window, softcap)
    return attend_paged(
        *(module.layer_idx, query, key, value, cache, step, spec, _values(s_aux)),
        backend=backend,
        batch_invariant=batch_invariant,
    ), None


def _values(sinks: Tensor | None) -> Tensor | None:
    """A layer's sinks as numbers: they are a parameter, and what needs gradients is refused."""
    return None if sinks is None else sinks.detach()


def no_mask(*_: Any, **__: Any) -> None:
    """The engine's starts say which tokens belong together."""

"""What a layer is made with, checked: its heads, and its formula for each type of attention."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pagedattn import AttentionSpec, InvalidInputError, UnsupportedError
from pagedattn._arrays.checks import flag, is_count
from pagedattn._arrays.inspect import shown
from pagedattn._arrays.memory import require_memory
from pagedattn._dispatch.backend import LACKS
from pagedattn._dispatch.registry import Framework, record

from ..arrays import tensor
from .attention_type import AttentionType


def specs_by_type(
    scale: float | None,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    alibi_slopes: Sequence[float] | Tensor | None,
) -> dict[AttentionType, AttentionSpec]:
    """The formula for each type: they differ in causality alone."""
    slopes: Any = alibi_slopes
    if isinstance(alibi_slopes, Tensor):
        require_memory("alibi_slopes", alibi_slopes)
        slopes = tensor("alibi_slopes", alibi_slopes, "cpu").tolist()
    return {
        kind: AttentionSpec(
            scale=scale,
            causal=kind.causal,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            alibi_slopes=slopes,
        )
        for kind in AttentionType
    }


def check_heads(num_heads: int, num_kv_heads: int, head_size: int) -> None:
    """Requires sizes above 0, and as many query heads for one KV head as for another."""
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size}
    for name, size in sizes.items():
        if not is_count(size):
            raise InvalidInputError(f"{name} must be above 0, got {shown(size)}")
    if num_heads % num_kv_heads != 0:
        raise InvalidInputError(
            f"num_heads must be a multiple of num_kv_heads = {num_kv_heads}, got {num_heads}"
        )


def check_slopes(specs: dict[AttentionType, AttentionSpec], num_heads: int) -> None:
    """Requires a slope for each query head, where there are any."""
    slopes = specs[AttentionType.DECODER].alibi_slopes
    if slopes is not None and len(slopes) != num_heads:
        raise InvalidInputError(
            f"alibi_slopes must have one slope for each of the {num_heads} query heads, got "
            f"{len(slopes or ())}"
        )


def check_batch_invariant(batch_invariant, backend: str) -> None:
    """Requires a flag, and a backend that promises it where it is set."""
    flag("batch_invariant", batch_invariant)
    if batch_invariant and "batch_invariant" not in record(backend, Framework.TORCH).supports:
        raise UnsupportedError(
            f"backend {backend!r} cannot run these layers: batch_invariant: {backend} {LACKS}"
        )


def slopes_of(spec: AttentionSpec) -> Tensor | None:
    """The slopes as engines read them: float32 on the CPU."""
    slopes = spec.alibi_slopes
    return None if slopes is None else torch.tensor(slopes, dtype=torch.float32, device="cpu")

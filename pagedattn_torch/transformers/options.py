"""The options of transformers' attention: what becomes an `AttentionSpec`, and what is refused."""

from typing import Any

from pagedattn import AttentionSpec, UnsupportedError

# Arguments that change the result and have no counterpart here, and what they are.
REFUSED = {
    "position_bias": "a bias on positions",
    "output_attentions": "the weights as a result",
    "block_indices": "blocks of keys that a query chooses",
    "indices": "keys that a query chooses",
}


def require_supported(module: Any, dropout: float, options: dict[str, Any]) -> None:
    """Refuses, by its name, what would change the result.

    Raises:
      UnsupportedError: training with dropout, or an option of `REFUSED`.
    """
    if dropout:
        raise UnsupportedError(f"pagedattn is for inference: dropout must be 0, got {dropout}")
    asked = [f"{name} ({what})" for name, what in REFUSED.items() if _is_set(options.get(name))]
    if asked:
        raise UnsupportedError(
            f"pagedattn does not have {', '.join(asked)}, which {type(module).__name__} asks for: "
            "set_attn_implementation('sdpa') or 'eager' runs this model"
        )


def require_positions(batch_invariant: bool, window: int | None) -> None:
    """Refuses `batch_invariant` where keys lose their positions.

    Raises:
      UnsupportedError: a layer with a window, whose cache drops the keys behind it.
    """
    if batch_invariant and window is not None:
        raise UnsupportedError(
            "batch_invariant: transformers' caches of layers with a sliding window drop keys, and "
            f"what is left begins at another position in each call; got sliding_window={window}"
        )


def spec_of(
    scaling: float | None, causal: bool, window: int | None, softcap: float | None
) -> AttentionSpec:
    return AttentionSpec(
        scale=scaling, causal=causal, sliding_window=window, logits_soft_cap=softcap
    )


def _is_set(value: Any) -> bool:
    return value is not None and value is not False

"""Rotary position embedding, and its scalings for longer contexts."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclass(frozen=True, kw_only=True)
class Linear:
    """RoPE scaling that slows all angles down by `factor`."""

    factor: float
    rope_type: str = "linear"

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        return frequencies / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3:
    """RoPE scaling of Llama 3: slows slow angles down by `factor`, keeps fast ones, blends between.

    An angle is slow if it makes fewer than `low_freq_factor` turns in the original context, and
    fast if it makes more than `high_freq_factor`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    rope_type: str = "llama3"

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((turns - self.low_freq_factor) / span, 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


SCALINGS = {"linear": Linear, "llama3": Llama3}


def read_rope(raw: dict) -> dict:
    """`rope_theta` and `rope_scaling` of a config, wherever older or newer versions keep them.

    Raises ValueError for a rotation that is not implemented.
    """
    rope = (raw.get("rope_scaling") or {}) | (raw.get("rope_parameters") or {})
    theta = rope.pop("rope_theta", raw.get("rope_theta", 10000.0))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    if rope.pop("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("a partial_rotary_factor is not implemented: extend rope() in rotary.py")
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind not in SCALINGS:
        raise ValueError(f"RoPE of type {kind!r} is not implemented: extend SCALINGS in rotary.py")
    rope.pop("type", None)
    try:
        return {"rope_theta": theta, "rope_scaling": SCALINGS[kind](**rope)}
    except TypeError as error:
        raise ValueError(f"RoPE of type {kind!r} does not have the fields of {rope}") from error


def rope(
    x: Float[Array, "num_tokens num_heads head_dim"],
    positions: Int[Array, " num_tokens"],
    theta: float,
    scaling: Linear | Llama3 | None = None,
) -> Float[Array, "num_tokens num_heads head_dim"]:
    """Rotates the pairs (i, i + head_dim / 2) by an angle that grows with the position."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-np.arange(half) / half)
    frequencies = scaling(frequencies) if scaling else frequencies
    angles = (positions[:, None] * jnp.asarray(frequencies, jnp.float32))[:, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x, 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]  # in float32
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)

"""Rotary position embedding, and its scalings for longer contexts."""

import math
from dataclasses import dataclass, fields

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pagedattn import InvalidInputError
from pagedattn_serving.families.settings import require_kinds


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """How RoPE serves contexts that are longer, by about `factor`, than those first trained on."""

    factor: float

    @property
    def magnitude(self) -> float:
        """What the turned heads are multiplied by."""
        return 1.0

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        """The frequencies instead of these, which fall by one ratio from 1 on."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Linear(Scaling):
    """Slows all angles down by `factor`."""

    rope_type: str = "linear"

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        return frequencies / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3(Scaling):
    """Slows slow angles down by `factor`, keeps fast ones, blends between by their turns.

    An angle is slow if it makes fewer than `low_freq_factor` turns in the original context, and
    fast if it makes more than `high_freq_factor`.
    """

    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    rope_type: str = "llama3"

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((turns - self.low_freq_factor) / span, 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True, kw_only=True)
class Yarn(Scaling):
    """As Llama3, but blends by the number of the frequency, and lengthens the heads.

    Slow is fewer than `beta_slow` turns, fast is more than `beta_fast`.
    """

    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0  # both or none
    mscale_all_dim: float = 0.0
    truncate: bool = True
    rope_type: str = "yarn"

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.grown(self.mscale) / self.grown(self.mscale_all_dim)
        return self.grown(1.0)

    def grown(self, mscale: float) -> float:
        """What logits of a longer context need to stay as sharp, once a head, at this weight."""
        return 1 + 0.1 * mscale * math.log(max(self.factor, 1))

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        fast, slow = (self._index(frequencies, turns) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            fast, slow = math.floor(fast), math.ceil(slow)
        first, last = max(fast, 0), min(slow, 2 * len(frequencies) - 1)
        slowed = np.clip((np.arange(len(frequencies)) - first) / (last - first or 0.001), 0, 1)
        return frequencies * (1 - slowed + slowed / self.factor)

    def _index(self, frequencies: np.ndarray, turns: float) -> float:
        """Where, between the numbers of the frequencies, one makes so many turns."""
        frequency = 2 * math.pi * turns / self.original_max_position_embeddings
        return math.log(frequency) / math.log(frequencies[1])


SCALINGS = {"linear": Linear, "llama3": Llama3, "yarn": Yarn}
PLACES = ("rope_scaling", "rope_parameters")  # of older and newer versions of transformers
LOOSE = ("rope_theta", "partial_rotary_factor")  # beside them, in older versions


def take_rope(raw: dict) -> dict:
    """`rope_theta` and `rope_scaling`, where given; takes out of the config what says so.

    Raises:
      InvalidInputError: The rotation is not implemented.
    """
    rope = {name: raw.pop(name) for name in LOOSE if name in raw}
    for place in PLACES:
        rope |= raw.pop(place, None) or {}
    rope = {name: value for name, value in rope.items() if value is not None}
    theta = {"rope_theta": rope.pop("rope_theta")} if "rope_theta" in rope else {}
    older = rope.pop("type", None)
    kind = rope.pop("rope_type", older)
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise InvalidInputError(
            "a partial_rotary_factor is not implemented: extend rope() in rotary.py"
        )
    if kind is None and not rope:
        return theta
    return theta | {"rope_scaling": read_scaling(kind or "default", rope)}


def read_scaling(kind: str, values: dict) -> Scaling | None:
    if kind == "default":
        return None
    if kind not in SCALINGS:
        raise InvalidInputError(
            f"RoPE of type {kind!r} is not implemented: extend SCALINGS in rotary.py"
        )
    try:
        scaling = SCALINGS[kind](**values)
    except TypeError as error:
        raise InvalidInputError(
            f"RoPE of type {kind!r} does not have the fields of {values}"
        ) from error
    require_kinds(kind, values, {field.name: field.type for field in fields(scaling)})
    return scaling


def paired_apart(x: Float[Array, "*tokens head_dim"]) -> Float[Array, "*tokens head_dim"]:
    """Heads in which `rope` rotates features 2i and 2i + 1: it leaves them apart.

    That changes no product of a query and a key, if both are.
    """
    return jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)


def rope(
    x: Float[Array, "num_tokens num_heads head_dim"],
    positions: Int[Array, " num_tokens"],
    theta: float,
    scaling: Scaling | None = None,
) -> Float[Array, "num_tokens num_heads head_dim"]:
    """Rotates the pairs (i, i + head_dim / 2) by an angle that grows with the position."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-np.arange(half) / half)
    frequencies = scaling(frequencies) if scaling else frequencies
    angles = (positions[:, None] * jnp.asarray(frequencies, jnp.float32))[:, None, :]
    magnitude = scaling.magnitude if scaling else 1.0
    cos, sin = magnitude * jnp.cos(angles), magnitude * jnp.sin(angles)
    first, second = jnp.split(x, 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]  # in float32
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)

"""What one attention layer computes, apart from its arrays."""

import math
import operator
from dataclasses import dataclass, fields

import jax
import numpy as np

from ._arrays.checks import count, static, whole
from ._arrays.inspect import shown
from ._arrays.memory import require_memory
from .errors import InvalidInputError


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The formula of a layer: frozen, hashable, and a pytree without leaves.

    So `jax.jit` takes it as an argument, alone or in a pytree, and traces again for another one.

    For a query at position p, a key at position j and query head h:

        logit = scale * <q, k>
        logit = cap * tanh(logit / cap)        with logits_soft_cap
        logit = logit - slope[h] * |p - j|     with alibi_slopes
        visible = (not causal or j <= p) and (no window or |p - j| < sliding_window)

    Args:
      scale: factor on the dot product; None is `head_dim ** -0.5`.
      causal: whether a token sees only itself and earlier tokens.
      sliding_window: number of visible keys, the token itself included; symmetric when not
        causal; None is no window.
      logits_soft_cap: bound of the scaled logits (Gemma 2), from 1e-30 to 1e30; None is no cap.
      alibi_slopes: one float per query head, of any sign (Press et al., 2022); None is no ALiBi.

    Raises:
      InvalidInputError: a value is out of its range.

    >>> AttentionSpec(sliding_window=128).sliding_window
    128
    """

    scale: float | None = None
    causal: bool = True
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None

    def __init_subclass__(cls) -> None:
        jax.tree_util.register_static(cls)

    def __post_init__(self) -> None:
        object.__setattr__(self, "causal", _flag("causal", self.causal))
        for name, convert in _CONVERSIONS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, convert(name, value))

    def scale_for(self, head_dim: int) -> float:
        """The factor on the dot product: `scale`, or the default for this `head_dim`."""
        return head_dim**-0.5 if self.scale is None else self.scale


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """The standard ALiBi slopes: `2 ** (-8 * i / n)`, i = 1..n, for n a power of two.

    For other counts the family of the next smaller power of two is filled up with every second
    slope of the next larger one, as in the paper's reference code (Press et al., 2022).

    Raises:
      InvalidInputError: `num_heads` is not an integer above 0.

    >>> alibi_slopes(4)
    (0.25, 0.0625, 0.015625, 0.00390625)
    """
    num_heads = count("num_heads", num_heads)
    power = 1 << (num_heads.bit_length() - 1)
    return (_family(power) + _family(2 * power)[::2])[:num_heads]


def _family(power: int) -> tuple[float, ...]:
    return tuple(2.0 ** (-8.0 * i / power) for i in range(1, power + 1))


def _finite(name, value) -> float:
    static(name, value)
    require_memory(name, value)
    number = _number(value)
    if not abs(number) <= _LARGEST:
        raise InvalidInputError(
            f"{name} must be a finite number that float32 holds, got {shown(value)}"
        )
    return number


def _number(value) -> float:
    """The value as a float; NaN if it is not one number: a string, an array."""
    if not hasattr(type(value), "__float__") or np.ndim(value):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def _flag(name, value) -> bool:
    static(name, value)
    if not isinstance(value, bool | np.bool_):
        raise InvalidInputError(f"{name} must be True or False, got {shown(value)}")
    return bool(value)


def _cap(name, value) -> float:
    number = _finite(name, value)
    if not 1e-30 <= number <= 1e30:
        raise InvalidInputError(
            f"{name} must be above 0, from 1e-30 to 1e30, got {shown(value)}; None turns it off"
        )
    return number


def window_of(name, value) -> int:
    """A sliding window, at most the widest that can hide anything."""
    static(name, value)
    window = whole(value)
    if not (window is not None and window >= 1):
        raise InvalidInputError(
            f"{name} must be an integer of at least 1 (the token itself is one of the visible "
            f"keys), got {shown(value)}; None turns it off"
        )
    return min(operator.index(value), _LONGEST)


def slopes_of(name, value) -> tuple[float, ...]:
    try:
        slopes = tuple(value)
    except Exception as error:  # whatever iterating a foreign object raises
        raise InvalidInputError(
            f"{name} must be a sequence of one float for each query head, got {shown(value)}"
        ) from error
    return tuple(_finite(f"each of {name}", slope) for slope in slopes)


_LARGEST = float(np.finfo(np.float32).max)
# A wider window hides nothing, since no sequence is longer; position + window stays in int32.
_LONGEST = 1 << 30


_CONVERSIONS = {
    "scale": _finite,
    "sliding_window": window_of,
    "logits_soft_cap": _cap,
    "alibi_slopes": slopes_of,
}


def set_options(spec: AttentionSpec) -> list[str]:
    """The options that are set to something else than their default."""
    return [field.name for field in fields(spec) if getattr(spec, field.name) != field.default]


def require_spec(spec) -> None:
    if not isinstance(spec, AttentionSpec):
        raise InvalidInputError(
            f"spec must be an AttentionSpec, got {type(spec).__name__}; what belongs to the "
            "formula is a keyword of it: AttentionSpec(scale=...)"
        )

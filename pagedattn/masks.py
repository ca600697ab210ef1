"""Who sees which key: masks, biases and ranges of keys, as pure arrays.

NumPy, JAX and torch arrays all work. Positions are integers of shape `[..., q]` and `[..., k]`,
of one framework; others raise InvalidInputError. Masks have shape `[..., q, k]`, ALiBi's bias
`[..., num_heads, q, k]`. Distances are integers: in bfloat16 they would be wrong from 257 on.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Float32, Integer, Shaped

from ._arrays.checks import an_array
from ._arrays.devices import on_one_device
from ._arrays.dlpack import as_jax
from ._arrays.inspect import describe, dtype_name, is_floating, is_integer
from ._arrays.memory import require_alike
from ._arrays.namespace import as_dtype, namespace, take_along
from ._arrays.typing import is_torch
from .errors import InvalidInputError, UnsupportedError
from .spec import AttentionSpec, require_spec, set_options, slopes_of, window_of

# Scales and soft-caps are of the logits that the bias is added to.
KNOWN = {"scale", "causal", "sliding_window", "logits_soft_cap", "alibi_slopes"}
Queries = Integer[Any, "*#n q"]
Keys = Integer[Any, "*#n k"]
WORD = 32  # bits of a word of a `DraftTree`


def distance(query_positions: Queries, key_positions: Keys) -> Integer[Any, "*#n q k"]:
    """Query position minus key position: int `[..., q, k]`."""
    return query_positions[..., :, None] - key_positions[..., None, :]


@on_one_device
def causal_mask(query_positions: Queries, key_positions: Keys) -> Bool[Any, "*#n q k"]:
    """True where the key is not after the query: `[..., q, k]`.

    Raises:
      InvalidInputError: positions that are not integers, are of two frameworks, or whose leading
        dimensions do not fit together.

    >>> causal_mask(np.arange(2), np.arange(3))
    array([[ True, False, False],
           [ True,  True, False]])
    """
    return distance(*_checked(query_positions, key_positions)) >= 0


@on_one_device
def sliding_window_mask(
    query_positions: Queries, key_positions: Keys, sliding_window: int
) -> Bool[Any, "*#n q k"]:
    """True where query and key are less than `sliding_window` apart: `[..., q, k]`.

    Raises:
      InvalidInputError: as `causal_mask`, or a window that is not an integer above 0.

    >>> sliding_window_mask(np.array([2]), np.arange(5), 2)
    array([[False,  True,  True,  True, False]])
    """
    sliding_window = window_of("sliding_window", sliding_window)
    return abs(distance(*_checked(query_positions, key_positions))) < sliding_window


@on_one_device
def alibi_bias(
    query_positions: Queries,
    key_positions: Keys,
    slopes: Sequence[float] | Float[Any, "num_heads"],
) -> Float32[Any, "*m num_heads q k"]:
    """`-slope * |p - j|` (Press et al., 2022): float32 `[..., num_heads, q, k]`.

    `slopes` is a sequence of floats or an array of the positions' framework, one entry per query
    head, of any sign.

    Raises:
      InvalidInputError: as `causal_mask`, or slopes that are not numbers `[num_heads]`.

    >>> alibi_bias(np.array([2]), np.arange(3), (0.5,))
    array([[[-1. , -0.5, -0. ]]], dtype=float32)
    """
    slopes = _slopes(slopes, query_positions)
    apart = -_float32(abs(distance(*_checked(query_positions, key_positions))))
    slopes = _float32_like(apart, slopes).reshape(*[1] * (apart.ndim - 2), -1, 1, 1)
    return apart[..., None, :, :] * slopes


def visible_mask(
    query_positions: Queries, key_positions: Keys, spec: AttentionSpec
) -> Bool[Any, "*#n q k"]:
    """True where the spec lets the query see the key."""
    apart = distance(query_positions, key_positions)
    visible = apart >= 0 if spec.causal else apart == apart
    if spec.sliding_window is not None:
        visible = visible & (abs(apart) < spec.sliding_window)
    return visible


def descent_mask(
    ancestors: Integer[Any, "*#n q words"], own_indices: Integer[Any, "*#n k"]
) -> Bool[Any, "*#n q k"]:
    """True where a key is of the context, or in the query's own line of descent.

    Args:
      ancestors: the queries' rows of `DraftTree.ancestors`.
      own_indices: of each key among the new tokens of the queries' sequence; negative in the
        context.

    >>> descent_mask(np.array([[0b01], [0b11]], np.int32), np.array([-1, 0, 1]))
    array([[ True,  True, False],
           [ True,  True,  True]])
    """
    last = WORD * ancestors.shape[-1] - 1
    at = namespace(own_indices).clip(own_indices, 0, last)
    word = take_along(ancestors, (at // WORD)[..., None, :])
    shown = (word >> (at % WORD)[..., None, :]) & 1
    return (shown == 1) | (own_indices < 0)[..., None, :]


@on_one_device
def attention_bias(
    query_positions: Queries, key_positions: Keys, spec: AttentionSpec
) -> Float32[Any, "*bias q k"]:
    """What the spec adds to the scaled (and capped) logits: ALiBi, and -inf where invisible.

    Returns float32 `[..., q, k]`, with ALiBi `[..., num_heads, q, k]`.

    Raises:
      InvalidInputError: as `causal_mask`, or a spec that is no AttentionSpec.
      UnsupportedError: an option of a subclass, which is unknown here.

    >>> attention_bias(np.arange(2), np.arange(2), AttentionSpec())
    array([[  0., -inf],
           [  0.,   0.]], dtype=float32)
    """
    require_spec(spec)
    if unknown := [option for option in set_options(spec) if option not in KNOWN]:
        raise UnsupportedError(f"{unknown[0]}: no bias is known for this option of the spec")
    query_positions, key_positions = _checked(query_positions, key_positions)
    bias = additive(visible_mask(query_positions, key_positions, spec))
    if spec.alibi_slopes is None:
        return bias
    return bias[..., None, :, :] + alibi_bias(query_positions, key_positions, spec.alibi_slopes)


def additive(visible: Bool[Any, "*n"]) -> Float32[Any, "*n"]:
    """float32: 0 where True, -inf where False; as 1 - 1 / x, which needs operators alone."""
    with np.errstate(divide="ignore"):
        return 1 - 1 / _float32(visible)


def key_range(lowest, highest, num_keys, causal: bool, window: int | None) -> tuple[Any, Any]:
    """The keys `[first, last)` that any query from position `lowest` to `highest` sees.

    No key outside is seen by any of them; a single query may see only some of those inside. Takes
    integers, or arrays of them; `window` is the sliding window, None without one.

    >>> key_range(np.array([4]), np.array([6]), np.array([9]), causal=True, window=3)
    (array([2]), array([7]))
    """
    reach = 1 if causal else window
    if reach is None:
        return 0 * num_keys, num_keys
    clip = _clip if isinstance(lowest, int) else namespace(lowest).clip
    first = 0 * num_keys if window is None else clip(lowest - window + 1, 0, None)
    return first, clip(highest + reach, None, num_keys)


def _clip(number: int, least: int | None, most: int | None) -> int:
    number = number if least is None else max(number, least)
    return number if most is None else min(number, most)


def common_key_range(
    lowest, highest, num_keys, causal: bool, window: int | None
) -> tuple[Any, Any]:
    """The keys `[first, last)` that every query from position `lowest` to `highest` sees.

    There are none where `last <= first`. Takes what `key_range` takes.

    >>> common_key_range(np.array([4]), np.array([6]), np.array([9]), causal=True, window=4)
    (array([3]), array([5]))
    """
    return key_range(highest, lowest, num_keys, causal, window)


def sees_a_key(positions, num_keys, causal: bool, window: int | None):
    """True where a query sees any of `num_keys` keys; in cross attention positions may be negative.

    >>> sees_a_key(np.array([-2, -1, 0]), np.array([4, 4, 0]), causal=False, window=2)
    array([False,  True, False])
    """
    seen = (num_keys > 0) & (positions == positions)
    if causal:
        seen = seen & (positions >= 0)
    elif window is not None:
        seen = seen & (positions + window > 0)
    return seen if window is None else seen & (positions - window < num_keys - 1)


def _checked(query, key):
    """Arrays that can be subtracted: of one framework, signed, in the machine's byte order."""
    query, key = _positions("query_positions", query), _positions("key_positions", key)
    if is_torch(query) != is_torch(key):
        raise InvalidInputError(
            "query_positions and key_positions must both be torch tensors, or neither"
        )
    if is_torch(query):
        require_alike(query_positions=query, key_positions=key)
    leading = zip(query.shape[-2::-1], key.shape[-2::-1], strict=False)
    if not all(a == b or 1 in (a, b) for a, b in leading):
        raise InvalidInputError(
            "query_positions and key_positions must agree in all dimensions but the last, got "
            f"{tuple(query.shape)} and {tuple(key.shape)}"
        )
    return query, key


def _positions(name, array) -> Any:
    an_array(name, array)
    if not (array.ndim > 0 and is_integer(array.dtype)):
        raise InvalidInputError(
            f"{name} must be integers of at least one dimension, got {describe(array)}"
        )
    array = _known_kind(name, array)
    # Differences of narrower or unsigned integers would wrap.
    if dtype_name(array.dtype) in ("int32", "int64"):
        return _native(array)
    xp = namespace(array)
    return as_dtype(array, xp.int32 if xp is jnp else xp.int64)


def _known_kind(name, array) -> Any:
    """The array; one with DLPack alone as NumPy's or JAX's over its memory."""
    known = isinstance(array, jax.Array | np.ndarray | np.generic) or is_torch(array)
    return array if known else as_jax(name, array)


def _slopes(slopes, positions):
    if not hasattr(slopes, "__dlpack__") and not hasattr(slopes, "ndim"):
        return slopes_of("slopes", slopes)
    an_array("slopes", slopes)
    numbers = is_floating(slopes.dtype) or is_integer(slopes.dtype)
    if not (slopes.ndim == 1 and numbers):
        raise InvalidInputError(f"slopes must be numbers [num_heads], got {describe(slopes)}")
    if not is_torch(positions) and is_torch(slopes):
        raise InvalidInputError("slopes must be of the positions' framework, got a torch tensor")
    return _known_kind("slopes", slopes)


def _native(array):
    swapped = isinstance(array, np.ndarray) and not array.dtype.isnative
    return array.astype(array.dtype.newbyteorder("=")) if swapped else array


def _float32(array: Shaped[Any, "*n"]) -> Float32[Any, "*n"]:
    return as_dtype(array, namespace(array).float32)


def _float32_like(array, values) -> Any:
    # torch's operators take no NumPy array; NumPy's and JAX's do.
    if is_torch(array):
        return values if is_torch(values) else array.new_tensor(values)
    return _float32(values) if hasattr(values, "ndim") else np.asarray(values, np.float32)

"""Attention states (out, lse) and their merge."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from .checks import an_array, describe, is_floating, require
from .foreign import takes_any_array


@takes_any_array
def merge_states(
    out_a: Float[Array, "*rows head_dim"],
    lse_a: Float[Array, "*rows"],
    out_b: Float[Array, "*rows head_dim"],
    lse_b: Float[Array, "*rows"],
) -> tuple[Float[Array, "*rows head_dim"], Float[Array, "*rows"]]:
    """Joins attention over two disjoint sets of keys into attention over their union.

    `lse` is the natural log of the sum of exponentials. The merge is associative and commutative
    to rounding. A state that saw no key has lse -inf (or +inf, as FlashAttention 2 gives it): its
    out is not read, and merging with it changes nothing. The formula is the online softmax's
    (Milakov & Gimelshein, 2018):

        lse = log(exp(lse_a) + exp(lse_b)),   out = sum of out_i * exp(lse_i - lse)

    Returns:
      out in the dtype of `out_a`, and lse; where neither state saw a key, 0 and -inf.

    Raises:
      InvalidInputError: shapes that do not fit together, or arrays that are not floating.

    >>> out, lse = merge_states(jnp.ones((1, 2)), jnp.zeros(1), jnp.zeros((1, 2)), jnp.zeros(1))
    >>> out.tolist()
    [[0.5, 0.5]]
    """
    _check(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    lse_a, lse_b = _marked(lse_a), _marked(lse_b)
    highest = jnp.maximum(lse_a, lse_b)
    highest = jnp.where(jnp.isneginf(highest), 0, highest)
    weight_a, weight_b = jnp.exp(lse_a - highest), jnp.exp(lse_b - highest)
    total = weight_a + weight_b
    empty = total == 0
    summed = _weighted(out_a, weight_a) + _weighted(out_b, weight_b)
    out = summed / jnp.where(empty, 1, total)[..., None]
    lse = jnp.where(empty, -jnp.inf, highest + jnp.log(jnp.where(empty, 1, total)))
    return out.astype(out_a.dtype), lse


def _marked(lse):
    """At least float32, and -inf wherever no key was seen."""
    lse = lse if lse.dtype == jnp.float64 else lse.astype(jnp.float32)
    return jnp.where(jnp.isposinf(lse), -jnp.inf, lse)


def _weighted(out, weight):
    # A state that saw no key may hold anything; 0 * NaN would be NaN.
    weight = weight[..., None]
    return jnp.where(weight > 0, out.astype(weight.dtype), 0) * weight


def _check(**arrays):
    for name, array in arrays.items():
        an_array(name, array)
        require(is_floating(array.dtype), f"{name} must be floating, got {describe(array)}")
    out_a, lse_a, out_b, lse_b = (array.shape for array in arrays.values())
    require(
        len(out_a) > 0 and out_a == out_b and out_a[:-1] == lse_a == lse_b,
        "merge_states expects two outs of one shape [..., head_dim] and two lses [...], got "
        f"{out_a}, {lse_a}, {out_b}, {lse_b}",
    )

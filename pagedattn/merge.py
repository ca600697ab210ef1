"""Attention states (out, lse) and their merge."""

from collections.abc import Hashable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._arrays.checks import an_array
from ._arrays.devices import on_one_device
from ._arrays.dlpack import takes_any_array
from ._arrays.inspect import describe, is_floating
from ._arrays.shard_map import axes_of
from .errors import InvalidInputError


@takes_any_array
@on_one_device
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
    shift = _finite(jnp.maximum(lse_a, lse_b))
    weight_a, weight_b = jnp.exp(lse_a - shift), jnp.exp(lse_b - shift)
    summed = _weighted(out_a, weight_a) + _weighted(out_b, weight_b)
    out, lse = _normalised(summed, weight_a + weight_b, shift)
    return out.astype(out_a.dtype), lse


@takes_any_array
@on_one_device
def merge_across(
    out: Float[Array, "*rows head_dim"],
    lse: Float[Array, "*rows"],
    axis_name: Hashable,
) -> tuple[Float[Array, "*rows head_dim"], Float[Array, "*rows"]]:
    """`merge_states` over all devices along an axis: each has attended to keys of its own.

    Inside `jax.shard_map`, or any function that names an axis, as `jax.vmap` does. It costs one
    collective: every device gathers the results of all, `out` and `lse` side by side in float32,
    and joins them by itself. The results are known not to vary along the axis, so no
    `check_vma=False` is needed.

    Args:
      out, lse: of this device's keys, as `paged_attention(..., return_lse=True)` gives them. A row
        that saw none of them has lse -inf (or +inf), and its out is not read.
      axis_name: the axis of the mesh, or a tuple of several.

    Returns:
      out in its dtype, and lse, over the keys of all devices and equal on all of them; where no
      device saw a key, 0 and -inf.

    Raises:
      InvalidInputError: arrays that do not fit together or are not floating; no such axis here.

    >>> outs, lses = jnp.ones((2, 1, 4, 8)), jnp.zeros((2, 1, 4))  # of two devices
    >>> merge = jax.vmap(lambda out, lse: merge_across(out, lse, "device"), axis_name="device")
    >>> out, lse = merge(outs, lses)
    >>> bool((lse == jnp.log(2)).all())
    True
    """
    _check_part(out, lse, axis_name)
    lse = _marked(lse)
    state = jnp.concatenate([out.astype(lse.dtype), lse[..., None]], axis=-1)
    states = _gathered(state, axis_name)
    outs, lses = states[..., :-1], states[..., -1]
    # The shift cancels out of the result, so it needs no gradient.
    shift = _finite(jax.lax.stop_gradient(lses.max(0, keepdims=True)))
    weights = jnp.exp(lses - shift)
    merged, lse = _normalised(_weighted(outs, weights).sum(0), weights.sum(0), shift[0])
    return merged.astype(out.dtype), lse


def _gathered(array, axis_name):
    """Those of all devices, on a new first axis; known not to vary, where that is kept track of."""
    tracked = axes_of(jax.lax.axis_index(axis_name))  # not by jax.vmap, nor without check_vma
    return jax.lax.all_gather(array, axis_name, to="invarying" if tracked else "varying")


def _marked(lse):
    """At least float32, and -inf wherever no key was seen."""
    lse = lse if lse.dtype == jnp.float64 else lse.astype(jnp.float32)
    return jnp.where(jnp.isposinf(lse), -jnp.inf, lse)


def _finite(highest):
    """What the lses are shifted by: their maximum, but 0 where all are -inf."""
    return jnp.where(jnp.isneginf(highest), 0, highest)


def _normalised(summed, total, shift):
    """out and lse of weighted values and weights that are summed up."""
    empty = total == 0
    total = jnp.where(empty, 1, total)
    return summed / total[..., None], jnp.where(empty, -jnp.inf, shift + jnp.log(total))


def _weighted(out, weight):
    # A state that saw no key may hold anything; 0 * NaN would be NaN.
    weight = weight[..., None]
    return jnp.where(weight > 0, out.astype(weight.dtype), 0) * weight


def _check(**arrays):
    _check_floating(**arrays)
    out_a, lse_a, out_b, lse_b = (array.shape for array in arrays.values())
    if not (len(out_a) > 0 and out_a == out_b and out_a[:-1] == lse_a == lse_b):
        raise InvalidInputError(
            "merge_states expects two outs of one shape [..., head_dim] and two lses [...], got "
            f"{out_a}, {lse_a}, {out_b}, {lse_b}"
        )


def _check_part(out, lse, axis_name):
    _check_floating(out=out, lse=lse)
    if not (out.ndim > 0 and out.shape[:-1] == lse.shape):
        raise InvalidInputError(
            f"merge_across expects out [..., head_dim] and lse [...], got {out.shape}, {lse.shape}"
        )
    try:
        jax.lax.axis_size(axis_name)
    except (NameError, TypeError, ValueError):
        raise InvalidInputError(
            "axis_name must name an axis around this call: one of jax.shard_map's mesh, or the "
            f"axis_name of jax.vmap; got {axis_name!r}"
        ) from None


def _check_floating(**arrays):
    for name, array in arrays.items():
        an_array(name, array)
        if not is_floating(array.dtype):
            raise InvalidInputError(f"{name} must be floating, got {describe(array)}")

"""From dot products to weights: what every row may see, and the running softmax."""

import math
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .kernel_config import UNIT, WARPGROUP, Shape
from .tiles import Tile, num_units, token_of

LAYOUT = plgpu.Layout.WGMMA
LOG2_E = math.log2(math.e)


class Rows(NamedTuple):
    """Of each row of a warpgroup: its position, its ALiBi slope, and the keys it sees."""

    position: Any
    slope: Any
    first_key: Any
    last_key: Any


def row_vector(value, dtype=jnp.float32):
    return plgpu.layout_cast(jnp.full((WARPGROUP,), value, dtype), LAYOUT.reduce(1))


def rows_of(shape: Shape, tile: Tile, slopes, head, warpgroup) -> Rows:
    spec = shape.spec
    if not spec.causal and spec.sliding_window is None and spec.alibi_slopes is None:
        return Rows(None, None, None, tile.key_len - 1)
    row = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP,), 0, layout=LAYOUT.reduce(1))
    unit = tile.first_unit + lax.div(row + warpgroup * WARPGROUP, jnp.int32(UNIT))
    unit = jnp.minimum(unit, num_units(shape, tile.query_len) - 1)
    token = token_of(tile.query_len, lax.div(unit, jnp.int32(shape.group)))
    token += lax.rem(row, jnp.int32(UNIT))
    position = tile.key_len - tile.query_len + token
    slope = slope_of(shape, slopes, head, unit)
    return Rows(position, slope, *visible_keys(shape, position, tile.key_len))


def slope_of(shape: Shape, slopes, head, unit):
    """The ALiBi slope of the query head of each unit; None without ALiBi."""
    if shape.spec.alibi_slopes is None:
        return None
    member, slope = lax.rem(unit, jnp.int32(shape.group)), row_vector(0.0)
    for i in range(shape.group):
        slope = jnp.where(member == i, slopes[head * shape.group + i], slope)
    return slope


def visible_keys(shape: Shape, position, key_len):
    """The first and the last key that a position sees; the first is None without a window."""
    window, last = shape.spec.sliding_window, key_len - 1
    if shape.spec.causal:
        last = jnp.minimum(last, position)
    elif window is not None:
        last = jnp.minimum(last, position + (window - 1))
    return None if window is None else position - (window - 1), last


def columns(shape: Shape):
    size = (WARPGROUP, shape.keys)
    return plgpu.broadcasted_iota(jnp.int32, size, 1, layout=LAYOUT)


def wide(rows, like):
    """One value for each row, or for all, as a matrix."""
    if not rows.ndim:
        return rows
    return lax.broadcast_in_dim(rows, like.shape, [0])


def only_visible(shape: Shape, rows: Rows, block, x):
    column, first_key = columns(shape), block * shape.keys
    visible = column <= wide(rows.last_key - first_key, x)
    if rows.first_key is not None:
        visible &= column >= wide(rows.first_key - first_key, x)
    return jnp.where(visible, x, -jnp.inf)


def is_plain(shape: Shape) -> bool:
    """Whether logits are dot products times a positive factor."""
    spec = shape.spec
    options = spec.logits_soft_cap is not None or spec.alibi_slopes is not None
    return not options and spec.scale_for(shape.head_dim) > 0


def logits(shape: Shape, rows: Rows, block, x):
    """The logits, without the positive factor of plain ones."""
    if is_plain(shape):
        return x
    spec = shape.spec
    x = x * spec.scale_for(shape.head_dim)
    if (cap := spec.logits_soft_cap) is not None:
        x = cap - 2 * cap / (1 + jnp.exp2(x * (2 * LOG2_E / cap)))
    if spec.alibi_slopes is not None:
        distance = jnp.abs(wide(rows.position - block * shape.keys, x) - columns(shape))
        x = x - wide(rows.slope, x) * distance.astype(jnp.float32)
    return x


def factor(shape: Shape) -> float:
    """From what `logits` gives to logits in base 2."""
    return LOG2_E * (shape.spec.scale_for(shape.head_dim) if is_plain(shape) else 1)


class Softmax(NamedTuple):
    """Of each row: the largest logit so far, in base 2, and the sum of the weights."""

    top: Any
    total: Any


def weigh(shape: Shape, x, state: Softmax):
    """The weights of logits, the state after them, and by what earlier sums shrink."""
    top = jnp.maximum(state.top, x.max(axis=1) * factor(shape))
    base = jnp.where(top == -jnp.inf, 0.0, top)
    kept = jnp.exp2(state.top - base)
    weights = jnp.exp2(x * factor(shape) - wide(base, x))
    return weights, Softmax(top, state.total * kept + weights.sum(axis=1)), kept

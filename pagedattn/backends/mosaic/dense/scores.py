"""From dot products to weights: what every row may see, and the running softmax."""

import math
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .kernel_config import WARPGROUP, KernelConfig
from .lines import Keys, has_positions, in_line
from .registers import LAYOUT, load, row_vector, wide
from .tiles import Tile, token_at, unit_of

LOG2_E = math.log2(math.e)
COLUMNS = 8  # that the four threads of a row have, two each


class Rows(NamedTuple):
    """Of each row of a warpgroup: its position, its ALiBi slope, and the keys it sees."""

    position: Any
    slope: Any
    first_key: Any
    last_key: Any


def rows_of(config: KernelConfig, arrays, tile: Tile, head, warpgroup) -> Rows:
    spec = config.spec
    if not spec.causal and spec.sliding_window is None and spec.alibi_slopes is None:
        return Rows(None, None, None, tile.key_len - 1)
    if config.words:
        return rows_in_lines(config, arrays, tile, head, warpgroup)
    token = token_at(config, tile, numbers_of(warpgroup))
    position = tile.key_len - tile.query_len + token
    slope = slope_of(config, arrays.slopes, tile, head, warpgroup)
    return Rows(position, slope, *visible_keys(config, position, tile.key_len))


def rows_in_lines(config: KernelConfig, arrays, tile: Tile, head, warpgroup) -> Rows:
    """Nothing that is not used: JAX would search long for the layout of what is not."""
    if not has_positions(config):
        return Rows(None, None, None, None)
    depth = load(arrays.lines.depths.at[tile.slot, warpgroup], LAYOUT.reduce(1))
    position, window = tile.key_len - tile.query_len + depth, config.spec.sliding_window
    slope = slope_of(config, arrays.slopes, tile, head, warpgroup)
    return Rows(position, slope, None if window is None else position - (window - 1), None)


def numbers_of(warpgroup):
    """The numbers of a warpgroup's rows in their tile."""
    row = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP,), 0, layout=LAYOUT.reduce(1))
    return row + warpgroup * WARPGROUP


def slope_of(config: KernelConfig, slopes, tile: Tile, head, warpgroup):
    """The ALiBi slope of the query head of each row, or of all; None without ALiBi."""
    if config.spec.alibi_slopes is None:
        return None
    if config.group == 1:
        return slopes[head]
    unit = unit_of(config, tile, numbers_of(warpgroup))
    member, slope = lax.rem(unit, jnp.int32(config.group)), row_vector(0.0)
    for i in range(config.group):
        slope = jnp.where(member == i, slopes[head * config.group + i], slope)
    return slope


def visible_keys(config: KernelConfig, position, key_len):
    """The first and the last key that a position sees; the first is None without a window."""
    window, last = config.spec.sliding_window, key_len - 1
    if config.spec.causal:
        last = jnp.minimum(last, position)
    elif window is not None:
        last = jnp.minimum(last, position + (window - 1))
    return None if window is None else position - (window - 1), last


def only_visible(rows: Rows, keys: Keys, x):
    if keys.words is None:
        visible = keys.positions <= wide(rows.last_key - keys.first, x)
    else:
        visible = in_line(keys)
    if rows.first_key is not None:
        visible &= keys.positions >= wide(rows.first_key - keys.first, x)
    return jnp.where(visible, x, -jnp.inf)


def is_plain(config: KernelConfig) -> bool:
    """Whether logits are dot products times a positive factor."""
    spec = config.spec
    options = spec.logits_soft_cap is not None or spec.alibi_slopes is not None
    return not options and spec.scale_for(config.head_dim) > 0


def logits(config: KernelConfig, rows: Rows, keys: Keys, x, unit):
    """The logits, without the positive factor of plain ones; products need `unit` too."""
    if is_plain(config):
        return x
    spec = config.spec
    x = x * wide(unit * spec.scale_for(config.head_dim), x)
    if (cap := spec.logits_soft_cap) is not None:
        x = cap - 2 * cap / (1 + jnp.exp2(x * (2 * LOG2_E / cap)))
    if spec.alibi_slopes is not None:
        distance = jnp.abs(wide(rows.position - keys.first, x) - keys.positions)
        x = x - wide(rows.slope, x) * distance.astype(jnp.float32)
    return x


def factor(config: KernelConfig, unit):
    """From what `logits` gives to logits in base 2."""
    return unit * (LOG2_E * config.spec.scale_for(config.head_dim)) if is_plain(config) else LOG2_E


class Softmax(NamedTuple):
    """Of each row: the largest logit so far, in base 2, and the sum of the weights.

    The sum is in eight columns until the end. A sum across threads waits behind what others widen
    and write to shared memory: chunks of float8 took 1.04 of the time.
    """

    top: Any
    total: Any


def weigh(x, state: Softmax, factor, exponent: int):
    """The weights of logits, the state after them, and by what earlier sums shrink.

    `factor` is that of a row, or of all, and 2 to the `exponent` the largest weight.
    """
    top = jnp.maximum(state.top, x.max(axis=1) * factor)
    base = jnp.where(top == -jnp.inf, 0.0, top)
    correction = jnp.exp2(state.top - base)
    weights = jnp.exp2(x * wide(factor, x) - wide(base - exponent, x))
    few = sum(weights[:, i : i + COLUMNS] for i in range(0, weights.shape[1], COLUMNS))
    return weights, Softmax(top, state.total * wide(correction, few) + few), correction

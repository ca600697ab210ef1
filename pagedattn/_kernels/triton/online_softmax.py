"""A tile's attention to its keys, step by step: products, masks and the online softmax."""

# Constants are NamedTuples here, which the type `constexpr` does not say.
# pyright: reportAttributeAccessIssue=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .eight_bits import octets, taken_apart, widened
from .four_bits import EIGHT, quarters
from .lines import in_line, standing
from .lists import positions_of
from .pages import find_slots, load_keys, load_slots, load_values
from .scales import load_scales

LOG2E = tl.constexpr(1.4426950408889634)
ONE = tl.constexpr(1.0)


class Formula(NamedTuple):
    """The numbers of the formula.

    Without ALiBi `scale` (or `cap`) includes log2(e), so that exp becomes a bare exp2. With ALiBi
    the factor comes last: slope times distance may be large, and is exact only without it.
    """

    scale: Any
    cap: Any
    window: Any


class Queries(NamedTuple):
    """The rows of a tile."""

    q: Any  # [rows, widths.dims]
    q_rest: Any  # [rows, widths.rest]; of four bits the second half; anything if there is none
    positions: Any  # as `positions_of` has those of keys
    slopes: Any
    lines: Any  # `Lines`; of no account without a tree


class State(NamedTuple):
    """The online softmax of the keys so far.

    Values that are read as pairs of columns are summed up in two tiles, of the even columns and of
    the odd ones; those of four bits in four, two of each half of the columns. With per-token scales
    `highest` is that of logits plus a bound on the logarithm of the value's scale: then no weight
    times that scale is above 1.
    """

    highest: Any  # logit
    total: Any  # of the weights
    sums: Any  # values by their weights, a tuple of tiles


class Span(NamedTuple):
    """Keys of a tile."""

    begin: Any  # only those in [begin, end) are read, as `positions_of` has them
    end: Any
    start: Any  # those in [start, stop) are attended to; of a selection, counted in its list
    stop: Any


@triton.jit
def attend_keys(
    state, span, queries, cache, formula, config: tl.constexpr, apart: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The state after the keys of a span.

    With MASKED backwards: the last step may have few keys, and as the first one it costs little,
    because the loads of the first two steps are under way together.

    Where products are of float16, for fewer bits, `formula.scale` is one scale for each row.
    """
    KEYS: tl.constexpr = config.keys
    SUMS: tl.constexpr = config.layout.sums
    start, stop = span.start, span.stop
    highest, total, sums = state.highest, state.total, state.sums
    if apart:
        rounded = tl.zeros([queries.q.shape[0], KEYS], queries.q.dtype)
    last = start + (stop - start - 1) // KEYS * KEYS
    for done in range(0, stop - start, KEYS):
        step = last - done if MASKED else start + done
        keys = step + tl.arange(0, KEYS)
        positions = positions_of(cache, step, keys, config)
        inside = (positions >= span.begin) & (positions < span.end)
        slots = find_slots(cache, step, keys, inside, config, MASKED)
        # Keys that no row sees are not read: a NaN there would survive a weight of 0.
        # Fewer bits become the query's dtype in registers.
        scales = load_scales(cache, slots, config, MASKED)
        k = load_keys(cache, slots, queries.q.dtype, config, MASKED)
        products = qk_matmul(queries, k, cache, slots, scales, formula.scale, config, apart, MASKED)
        v = load_values(cache, slots, k, config, MASKED)
        if apart:
            # The compiler gives each warp all keys of a product that leads to another one, so
            # that pairs of warps compute the same; through a branch it does not see that.
            kept = total
            if done < stop - start:
                weights, kept, highest, total = weigh(
                    products, scales, highest, total, positions, inside, queries, 1.0, formula,
                    config, MASKED,
                )  # fmt: skip
                rounded = of_values(weights, scales, config).to(queries.q.dtype)
        else:
            scale = scale_left(formula.scale, config)
            weights, kept, highest, total = weigh(
                products, scales, highest, total, positions, inside, queries, scale, formula,
                config, MASKED,
            )  # fmt: skip
            rounded = of_values(weights, scales, config).to(queries.q.dtype)
        # Not before: until here they take half the registers, or a quarter.
        tiles = value_tiles(v, cache, rounded.dtype, config)
        added = ()
        for i in tl.static_range(SUMS):
            product = tl.dot(rounded, tiles[i], sums[i] * kept[:, None], input_precision="ieee")
            added = added + (product,)  # noqa: RUF005
        sums = added
    return State(highest=highest, total=total, sums=sums)


@triton.jit
def scale_left(scale, config: tl.constexpr):
    """The scale that `qk_matmul` has not multiplied with."""
    return 1.0 if config.layout.halves or config.layout.nibbles else scale


@triton.jit
def of_values(weights, scales, config: tl.constexpr):
    """The weights of values as they are held, or as `value_tiles` has them."""
    if config.layout.scaled:
        weights = weights * scales.value[None, :]
    elif config.layout.nibbles:
        weights = weights * EIGHT
    return weights


@triton.jit
def value_tiles(v, cache, dtype: tl.constexpr, config: tl.constexpr):
    """The tiles that values are summed up in, of what was loaded."""
    if config.layout.nibbles:
        pairs, low, high = v
        tiles = quarters(pairs, low, high, dtype)
    elif config.layout.pairs:
        tiles = taken_apart(v, cache.value.dtype.element_ty)
    else:
        tiles = (v,)
    return tiles


@triton.jit
def qk_matmul(
    queries, k, cache, slots, scales, scale, config: tl.constexpr, apart: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The products of queries and keys; times the scale where `weigh` does not apply it."""
    layout: tl.constexpr = config.layout
    if layout.halves:
        scale = scale[:, None]
    if layout.nibbles:
        products = tl.dot(queries.q, tl.trans(k[0]), input_precision="ieee")
        products = tl.dot(queries.q_rest, tl.trans(k[1]), products, input_precision="ieee")
        scale = scale * EIGHT
    else:
        products = tl.dot(queries.q, tl.trans(k), input_precision="ieee")
    if config.widths.rest > 0:
        k_rest = load_rest(cache, slots, queries.q.dtype, config, MASKED)
        if apart:
            products = products * scale
            products += tl.dot(queries.q_rest, tl.trans(k_rest), input_precision="ieee") * scale
        else:
            products = tl.dot(queries.q_rest, tl.trans(k_rest), products, input_precision="ieee")
            if layout.halves:
                products = products * scale
    elif apart or layout.halves or layout.nibbles:
        products = products * scale
    return products * scales.key[None, :] if layout.scaled else products


@triton.jit
def load_rest(cache, slots, dtype: tl.constexpr, config: tl.constexpr, MASKED: tl.constexpr):
    """`[keys, widths.rest]`: the second tile of the keys."""
    widths: tl.constexpr = config.widths
    plane = octets(cache.key) if config.layout.halves else cache.key
    k = load_slots(
        plane, slots.keys, slots.inside, widths.dims, widths.rest, widths.head_dim, MASKED
    )
    if config.layout.halves:
        k = widened(k, cache.key.dtype.element_ty)
    return k.to(dtype)


@triton.jit
def weigh(
    products, scales, highest, total, positions, inside, queries, scale, formula,
    config: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A step of the online softmax: its weights, the factor on what was summed, and the state."""
    options: tl.constexpr = config.options
    exponent: tl.constexpr = LOG2E if options.alibi else ONE
    logits = logits_of(products, positions, inside, queries, scale, formula, options)
    if MASKED:
        visible = visible_keys(positions, inside, queries, formula, options)
        logits = tl.where(visible, logits, float("-inf"))
    if config.layout.scaled:
        new_highest = tl.maximum(highest, tl.max(logits + scales.log[None, :], 1))
    elif MASKED or options.soft_cap or options.alibi:
        new_highest = tl.maximum(highest, tl.max(logits, 1))
    else:
        # The same maximum, as scale is not negative, with one multiplication a row.
        new_highest = tl.maximum(highest, tl.max(products, 1) * scale)
    shift = new_highest
    if MASKED:
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2((logits - shift[:, None]) * exponent)
    kept = tl.exp2((highest - shift) * exponent)
    total = total * kept + tl.sum(weights, 1)
    return weights, kept, new_highest, total


@triton.jit
def logits_of(products, slots, inside, queries, scale, formula, options: tl.constexpr):
    logits = products * scale
    if options.soft_cap:
        logits = formula.cap * tanh(logits)
    if options.alibi:
        positions = standing_of(slots, inside, queries, options)
        distance = queries.positions[:, None] - positions[None, :]
        logits -= queries.slopes[:, None] * tl.abs(distance).to(tl.float32)
    return logits


@triton.jit
def visible_keys(slots, inside, queries, formula, options: tl.constexpr):
    """`[rows, keys]`: which query sees which of the keys that are inside."""
    positions = standing_of(slots, inside, queries, options)
    distance = queries.positions[:, None] - positions[None, :]
    visible = inside[None, :]
    if options.words > 0:
        visible = visible & in_line(slots, queries.lines, options.words)
    elif options.causal:
        visible = visible & (distance >= 0)
    elif options.window:
        visible = visible & (-distance < formula.window)
    if options.window:
        visible = visible & (distance < formula.window)
    return visible


@triton.jit
def standing_of(slots, inside, queries, options: tl.constexpr):
    """The positions of keys that lie so many slots after their sequence's first one."""
    return standing(queries.lines, slots, inside) if options.words > 0 else slots


@triton.jit
def tanh(x):
    """tanh to float32 rounding: by a polynomial near 0, where the exponential would cancel."""
    square = x * x
    near = -0.0062763858 * square + 0.0211162125
    near = near * square - 0.0538751378
    near = near * square + 0.1333292400
    near = near * square - 0.3333333043
    near = x + x * square * near
    size = tl.abs(x)
    fading = tl.exp2(size * (-2.0 * LOG2E))
    far = (1.0 - fading) / (1.0 + fading)
    return tl.where(size < 0.6, near, tl.where(x < 0, -far, far))

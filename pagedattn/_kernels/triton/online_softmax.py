"""A tile's attention to its keys, step by step: products, masks and the online softmax."""

# Constants are NamedTuples here, which the type `constexpr` does not say.
# pyright: reportAttributeAccessIssue=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .eight_bits import taken_apart
from .pages import find_slots, load_keys, load_slots, load_values

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
    q_rest: Any  # [rows, widths.rest]; anything if that is 0
    positions: Any
    slopes: Any


class State(NamedTuple):
    """The online softmax of the keys so far.

    Of values that are read as pairs of columns, `summed` has the even ones and `odd` the odd ones.
    """

    highest: Any  # logit
    total: Any  # of the weights
    summed: Any  # values by their weights
    odd: Any


class Span(NamedTuple):
    """Keys of a tile."""

    begin: Any  # only those in [begin, end) are read
    end: Any
    start: Any  # those in [start, stop) are attended to
    stop: Any


@triton.jit
def attend_keys(
    state, span, queries, cache, formula, config: tl.constexpr, apart: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The state after the keys of a span.

    With MASKED backwards: the last step may have few keys, and as the first one it costs little,
    because the loads of the first two steps are under way together.

    For caches of eight bits `formula.scale` is one scale for each row.
    """
    KEYS: tl.constexpr = config.keys
    options: tl.constexpr = config.options
    pairs: tl.constexpr = config.layout.pairs
    start, stop = span.start, span.stop
    highest, total, summed, odd = state.highest, state.total, state.summed, state.odd
    if apart:
        rounded = tl.zeros([queries.q.shape[0], KEYS], queries.q.dtype)
    last = start + (stop - start - 1) // KEYS * KEYS
    for done in range(0, stop - start, KEYS):
        step = last - done if MASKED else start + done
        keys = step + tl.arange(0, KEYS)
        inside = (keys >= span.begin) & (keys < span.end)
        slots = find_slots(cache, step, keys, inside, config, MASKED)
        # Keys that no row sees are not read: a NaN there would survive a weight of 0.
        # Eight bits become the query's dtype in registers.
        k = load_keys(cache, slots, queries.q.dtype, config, MASKED)
        products = qk_matmul(queries, k, cache, slots, formula.scale, config, apart, MASKED)
        v = load_values(cache, slots, k, config, MASKED)
        if apart:
            # The compiler gives each warp all keys of a product that leads to another one, so
            # that pairs of warps compute the same; through a branch it does not see that.
            kept = total
            if done < stop - start:
                weights, kept, highest, total = weigh(
                    products, highest, total, keys, inside, queries, 1.0, formula, options, MASKED,
                )  # fmt: skip
                rounded = weights.to(queries.q.dtype)
        else:
            weights, kept, highest, total = weigh(
                products, highest, total, keys, inside, queries, 1.0 if pairs else formula.scale,
                formula, options, MASKED,
            )  # fmt: skip
        summed = summed * kept[:, None]
        if not apart:
            rounded = weights.to(queries.q.dtype)
        if pairs:
            # Not before: until here they take half the registers.
            v, v_odd = taken_apart(v, cache.value.dtype.element_ty)
            odd = tl.dot(rounded, v_odd, odd * kept[:, None])
        summed = tl.dot(rounded, v, summed, input_precision="ieee")
    return State(highest=highest, total=total, summed=summed, odd=odd)


@triton.jit
def qk_matmul(
    queries, k, cache, slots, scale, config: tl.constexpr, apart: tl.constexpr, MASKED: tl.constexpr
):
    """The products of queries and keys; times the scale where `weigh` does not apply it."""
    widths: tl.constexpr = config.widths
    products = tl.dot(queries.q, tl.trans(k), input_precision="ieee")
    if widths.rest > 0:
        k_rest = load_slots(
            cache.key, slots.keys, slots.inside, widths.dims, widths.rest, widths.head_dim, MASKED
        ).to(queries.q.dtype)
        if apart:
            products = products * scale
            products += tl.dot(queries.q_rest, tl.trans(k_rest), input_precision="ieee") * scale
        else:
            products = tl.dot(queries.q_rest, tl.trans(k_rest), products, input_precision="ieee")
    elif apart:
        products = products * scale
    elif config.layout.pairs:
        products = products * scale[:, None]
    return products


@triton.jit
def weigh(
    products, highest, total, keys, inside, queries, scale, formula, options: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """A step of the online softmax: its weights, the factor on what was summed, and the state."""
    exponent: tl.constexpr = LOG2E if options.alibi else ONE
    logits = products * scale
    if options.soft_cap:
        logits = formula.cap * tanh(logits)
    distance = queries.positions[:, None] - keys[None, :]
    if options.alibi:
        logits -= queries.slopes[:, None] * tl.abs(distance).to(tl.float32)
    if MASKED:
        visible = inside[None, :]
        if options.causal:
            visible = visible & (distance >= 0)
        elif options.window:
            visible = visible & (-distance < formula.window)
        if options.window:
            visible = visible & (distance < formula.window)
        logits = tl.where(visible, logits, float("-inf"))
    if MASKED or options.soft_cap or options.alibi:
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

"""A tile's attention summed up in one order, however its keys are split.

Each step of keys, a leaf, has a state of its own. Leaves are joined in order to that of their
segment, and segments to the result. Programs take whole segments, or single leaves where keys are
few, and store the state of each: `join_kernel` goes on by the same rule.
"""

# Constants are NamedTuples here, which the type `constexpr` does not say.
# pyright: reportAttributeAccessIssue=false

import triton
import triton.language as tl

from .lists import positions_of
from .online_softmax import (
    Span,
    State,
    logits_of,
    of_values,
    qk_matmul,
    scale_left,
    value_tiles,
    visible_keys,
)
from .pages import find_slots, load_keys, load_values
from .scales import load_scales
from .states import columns_of, empty_state, join_states, nothing_seen

LOG2E = tl.constexpr(1.4426950408889634)
ONE = tl.constexpr(1.0)


@triton.jit
def attend_segments(
    rows, places, span, middle, before, queries, cache, formula, config: tl.constexpr,
    tile: tl.constexpr,
):  # fmt: skip
    """The state of all keys of a tile, after that before any key.

    Where keys are split, it is stored part by part: first the state before any key.
    """
    STEPS: tl.constexpr = config.segment // config.keys
    base = span.start // config.segment * config.segment  # where the first segment begins
    if config.split:
        if tl.program_id(1) == 0:
            store_part(rows, places, before, 0, config, tile)
        span = share_of(rows, places, span, base, config, tile)
    # A loop stores a segment whose last step it takes; of the last segment it may not exist.
    cut = (span.start < span.stop) & (tl.cdiv(span.stop, config.keys) % STEPS > 0)
    sums = before, empty_state(config, tile)
    if tile.unmasked:
        middle = tl.minimum(tl.maximum(middle, span.start), span.stop)
        unmasked = Span(begin=span.begin, end=span.end, start=span.start, stop=middle)
        sums = attend_leaves(
            rows, places, sums, unmasked, base, queries, cache, formula, config, tile, False
        )
        span = Span(begin=span.begin, end=span.end, start=middle, stop=span.stop)
    sums = attend_leaves(
        rows, places, sums, span, base, queries, cache, formula, config, tile, True
    )
    joined, segment = sums
    if config.part == config.segment:
        if config.split:
            if cut:
                last = part_of(base, span.stop - 1, config)
                store_part(rows, places, segment, last, config, tile)
        else:
            joined = join_states(joined, segment, config.options.alibi)
    return joined


@triton.jit
def share_of(rows, places, span, base, config: tl.constexpr, tile: tl.constexpr):
    """This program's share of the keys, in whole parts; says of parts past the end that none is."""
    PART: tl.constexpr = config.part
    count = tl.maximum(tl.cdiv(span.stop - base, PART), 0)
    share = tl.maximum(tl.cdiv(count, tl.num_programs(1)), config.min_steps)
    for part in range(1 + count + tl.program_id(1), rows.num_parts, tl.num_programs(1)):
        store_top(rows, places, nothing_seen(tile.rows), part)
    start = base + tl.minimum(tl.program_id(1) * share, count) * PART
    stop = tl.minimum(start + share * PART, span.stop)
    if config.keys < PART:
        start = tl.maximum(start, span.start)
    return Span(begin=span.begin, end=span.end, start=start, stop=stop)


@triton.jit
def part_of(base, key, config: tl.constexpr):
    """The part of a key. Part 0 is the state before any, part 1 begins with the first segment."""
    return 1 + (key - base) // config.part


@triton.jit
def attend_leaves(
    rows, places, sums, span, base, queries, cache, formula, config: tl.constexpr,
    tile: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What was joined, and the last segment, after the leaves of a span.

    One loop over all segments: loads of the next one are under way while one ends.
    """
    KEYS: tl.constexpr = config.keys
    alibi: tl.constexpr = config.options.alibi
    joined, segment = sums
    for step in range(span.start, span.stop, KEYS):
        state = attend_leaf(step, span, queries, cache, formula, config, MASKED)
        if config.part == KEYS:
            store_part(rows, places, state, part_of(base, step, config), config, tile)
        else:
            segment = join_states(segment, state, alibi)
            if (step + KEYS) % config.segment == 0:
                if config.split:
                    store_part(rows, places, segment, part_of(base, step, config), config, tile)
                else:
                    joined = join_states(joined, segment, alibi)
                segment = empty_state(config, tile)
    return joined, segment


@triton.jit
def attend_leaf(step, span, queries, cache, formula, config: tl.constexpr, MASKED: tl.constexpr):
    """The state of one step of keys."""
    SUMS: tl.constexpr = config.layout.sums
    keys = step + tl.arange(0, config.keys)
    positions = positions_of(cache, step, keys, config)
    inside = (positions >= span.begin) & (positions < span.end)
    slots = find_slots(cache, step, keys, inside, config, MASKED)
    scales = load_scales(cache, slots, config, MASKED)
    k = load_keys(cache, slots, queries.q.dtype, config, MASKED)
    products = qk_matmul(queries, k, cache, slots, scales, formula.scale, config, False, MASKED)
    v = load_values(cache, slots, k, config, MASKED)
    scale = scale_left(formula.scale, config)
    highest, weights = weigh_leaf(
        products, scales, positions, inside, queries, scale, formula, config, MASKED
    )
    rounded = of_values(weights, scales, config).to(queries.q.dtype)
    tiles = value_tiles(v, cache, rounded.dtype, config)
    sums = ()
    for i in tl.static_range(SUMS):
        sums = sums + (tl.dot(rounded, tiles[i], input_precision="ieee"),)  # noqa: RUF005
    return State(highest=highest, total=row_sums(weights), sums=sums)


@triton.jit
def weigh_leaf(
    products, scales, positions, inside, queries, scale, formula, config: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The highest logits of a leaf and its weights: the same bits with masks as without."""
    options: tl.constexpr = config.options
    visible = visible_keys(positions, inside, queries, formula, options)
    if options.soft_cap or options.alibi or config.layout.scaled:
        logits = logits_of(products, positions, inside, queries, scale, formula, options)
        logits = tl.where(visible, logits, float("-inf"))
        highest = tl.max(logits + scales.log[None, :] if config.layout.scaled else logits, 1)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        exponent: tl.constexpr = LOG2E if options.alibi else ONE
        return highest, tl.exp2((logits - shift[:, None]) * exponent)
    scales = tl.broadcast_to(scale, products.shape)
    if MASKED:
        highest = tl.max(tl.where(visible, products * scale, float("-inf")), 1)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        logits = tl.fma(products, scales, tl.broadcast_to(-shift[:, None], products.shape))
        return highest, tl.exp2(tl.where(visible, logits, float("-inf")))
    # The same maximum, as scale is not negative.
    highest = tl.max(products, 1) * scale
    shift = tl.broadcast_to(-highest[:, None], products.shape)
    return highest, tl.exp2(tl.fma(products, scales, shift))


@triton.jit
def row_sums(weights):
    """The sum of each row, two at a time: in the same order by any threads, of any tile."""
    ROWS: tl.constexpr = weights.shape[0]
    KEYS: tl.constexpr = weights.shape[1]
    # Neighbours first: a thread has both in what a product gives.
    sums = tl.sum(tl.reshape(weights, [ROWS, KEYS // 2, 2]), 2)
    for i in tl.static_range(1, 8):
        if KEYS >> i > 1:
            sums = tl.sum(tl.reshape(sums, [ROWS, 2, KEYS >> (i + 1)]), 1)
    return tl.reshape(sums, [ROWS])


@triton.jit
def store_part(rows, places, state, part, config: tl.constexpr, tile: tl.constexpr):
    """Stores a state: `[parts, rows]` sums, and `[parts, 2, rows]` highest logits and totals."""
    ROWS: tl.constexpr = tile.rows
    HALF: tl.constexpr = config.widths.value_dims // 2
    row = places.tokens.to(tl.int64) * rows.num_heads + places.heads
    at = part * rows.num_rows + row
    # In halves: they take less shared memory on their way to the threads that store them.
    halves = tl.reshape(columns_of(state, config, tile), [ROWS, 2, HALF])
    low, high = tl.split(tl.permute(halves, (0, 2, 1)))
    if config.layout.nibbles:
        MIDDLE: tl.constexpr = config.widths.value_dim // 2
    else:
        MIDDLE: tl.constexpr = HALF
    store_columns(rows, places, at, low, 0, MIDDLE, config)
    store_columns(rows, places, at, high, MIDDLE, config.widths.value_dim, config)
    store_top(rows, places, state.highest, part)
    tl.store(rows.lse + (2 * part + 1) * rows.num_rows + row, state.total, mask=places.exists)


@triton.jit
def store_columns(
    rows, places, at, columns, FIRST: tl.constexpr, LAST: tl.constexpr, config: tl.constexpr
):
    COLUMNS: tl.constexpr = config.widths.value_dim
    dims = FIRST + tl.arange(0, columns.shape[1])
    mask = places.exists[:, None] & (dims < tl.minimum(LAST, COLUMNS))[None, :]
    tl.store(rows.out + at[:, None] * COLUMNS + dims[None, :], columns, mask=mask)


@triton.jit
def store_top(rows, places, highest, part):
    """Stores the highest logits of a part; -inf says that it has no keys, and nothing else."""
    row = places.tokens.to(tl.int64) * rows.num_heads + places.heads
    tl.store(rows.lse + 2 * part * rows.num_rows + row, highest, mask=places.exists)

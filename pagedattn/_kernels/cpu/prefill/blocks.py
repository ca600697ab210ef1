"""A block of rows and a tile of keys: logits, weights and the online softmax, sums of values.

Weights are relative to a logit of the row, at first that of its first key. Sums are scaled down
only when a logit is above it by more than SLACK, as in FlashAttention-4: until then weights are
above 1, which the division by their sum undoes.
"""

import numpy as np

from ..call_args import work_item_at
from ..compiling import fast, within
from ..listed import run_of, seen_by, seen_range
from ..memory import get_float32, put_float32
from ..online_softmax import factor
from ..scalar_math import exp
from ..simd import LANES
from ..softmax import (
    NONE,
    ONE,
    ZERO,
    add_alibi_of_query,
    add_bias,
    cap_logits,
    hide,
    hide_other_lines,
)
from ..store_row import highest_of
from ..unpack import up_to
from .in_place import add_values, set_logits
from .micro_kernel import (
    LINE,
    PANEL,
    SLAB,
    block,
    columns,
    depth,
    few,
    few_product,
    in_place,
    product,
    rows,
)
from .room import (
    ADDRESS_BYTES,
    GRAIN,
    KEYS,
    keys_at,
    room_at,
    values_at,
)
from .weights import LOG2_E, scale_row, set_weights

SLACK = np.float32(16.0)  # natural logarithm: weights up to 9e6
FLOAT_LOG2_E = np.float32(LOG2_E)


@within
def add_tile(args, dtypes, item, first, start, count, room):
    """Adds a tile of keys to a block of rows, those from `start` on."""
    rows_here = min(block(dtypes), count - start)
    begin, end = seen_by_block(args, item, first, start, rows_here)
    if begin < end:
        if count <= in_place(dtypes):
            multiply_keys_in_place(args, dtypes, first, rows_here, begin, end, room)
        else:
            multiply_keys(dtypes, start, rows_here, begin, end, room)
        hidden = hides(args, item, first + begin, first + end, start, rows_here)
        adds = has_sums(start, rows_here, room)
        for row in range(start, start + rows_here):
            weigh_row(args, dtypes, item, first, row, begin, end, hidden, room)
        if count <= in_place(dtypes):
            multiply_values_in_place(args, dtypes, item, first, rows_here, begin, end, room)
        else:
            multiply_values(dtypes, start, rows_here, begin, end, adds, room)


@within
def add_tile_of_heads(args, dtypes, held, first, rooms):
    """As `add_tile` in place, for all KV heads of an item: some keys at a time, as they lie."""
    item, heads = work_item_at(room_at(args, dtypes, held, rooms, 0).item), rooms.heads
    begin, end = seen_by_block(args, item, first, 0, rooms.rows)
    if begin >= end:
        return
    for key in range(begin, end, LANES):
        for head in range(heads):
            room = room_at(args, dtypes, held, rooms, head)
            multiply_keys_in_place(args, dtypes, first, rooms.rows, key, key + LANES, room)
    hidden = hides(args, item, first + begin, first + end, 0, rooms.rows)
    for head in range(heads):
        room = room_at(args, dtypes, held, rooms, head)
        for row in range(rooms.rows):
            weigh_row(args, dtypes, work_item_at(room.item), first, row, begin, end, hidden, room)
    for key in range(begin, end, GRAIN):
        for head in range(heads):
            room = room_at(args, dtypes, held, rooms, head)
            stop = key + GRAIN
            multiply_values_in_place(args, dtypes, item, first, rooms.rows, key, stop, room)


@fast
def seen_by_block(args, item, first, start, rows_here):
    """The keys of a tile that a block of rows sees, from its first one on, in whole grains."""
    i, last = start // args.group, (start + rows_here - 1) // args.group
    begin, end = seen_by(args, item, i, last - i + 1)
    begin = max(begin - first, 0) // GRAIN * GRAIN
    return begin, max(begin, up_to(min(end - first, KEYS), GRAIN))


@fast
def has_sums(start, rows_here, room):
    """Whether any row of a block has seen a key."""
    for row in range(start, start + rows_here):
        if get_float32(room.state.highest, row) != NONE:
            return True
    return False


@fast
def hides(args, item, first, last, start, rows_here):
    """Whether there are keys from `first` to `last` that a row of a block does not see."""
    lowest = item.position + start // args.group
    highest = item.position + (start + rows_here - 1) // args.group
    begin, end = seen_range(args, item, highest, lowest)  # those that all rows see
    return first < begin or end < last or (args.depths != 0 and item.context < last)


@within
def multiply_keys_in_place(args, dtypes, first, rows_here, begin, end, room):
    for key in range(begin, end, LANES):
        keys = keys_at(room, first) + ADDRESS_BYTES * key
        values = values_at(room, first) + ADDRESS_BYTES * key
        for row in range(0, rows_here, few(dtypes)):
            logits, queries = room.logits + 4 * (KEYS * row + key), room.queries + row * SLAB
            set_logits(logits, 4 * KEYS, queries, keys, values, args.head_dim, dtypes)


@within
def multiply_values_in_place(args, dtypes, item, first, rows_here, begin, end, room):
    weights = room.weights + begin // depth(dtypes) * block(dtypes) * SLAB
    values = values_at(room, first) + ADDRESS_BYTES * begin
    later = values
    if first + KEYS < item.last:
        later = keys_at(room, first + KEYS) + ADDRESS_BYTES * begin
    width, count = room.sum_bytes, end - begin
    for row in range(0, rows_here, few(dtypes)):
        sums, left = room.state.sums + row * width, weights + row * SLAB
        add_values(sums, width, left, values, later, count, args.value_dim, dtypes)


@within
def multiply_keys(dtypes, start, rows_here, begin, end, room):
    """Sets the logits of a block of rows, without their scale."""
    slabs, width = room.query_bytes // SLAB, room.key_panel_bytes
    for key in range(begin, end, columns(dtypes)):
        panels = room.key_panels + key // PANEL * width
        logits = room.logits + 4 * key
        queries, row = room.queries + start * room.query_bytes, 0
        while row < rows_here:
            at, left = logits + 4 * KEYS * row, queries + row * SLAB
            if up_to(rows_here - row, few(dtypes)) < rows(dtypes):
                few_product(at, 4 * KEYS, left, panels, width, slabs, False, dtypes)
                row += few(dtypes)
            else:
                product(at, 4 * KEYS, left, panels, width, slabs, False, dtypes)
                row += rows(dtypes)


@within
def multiply_values(dtypes, start, rows_here, begin, end, adds, room):
    """Adds the values, weighted, to the sums of a block of rows, or sets these."""
    first, slabs = begin // depth(dtypes), end // depth(dtypes) - begin // depth(dtypes)
    weights = room.weights + first * block(dtypes) * SLAB
    width, size = room.value_panel_bytes, room.sum_bytes
    for column in range(0, room.sum_columns, columns(dtypes)):
        panels = room.value_panels + column // PANEL * width + first * LANES * LINE
        sums, row = room.state.sums + start * size + 4 * column, 0
        while row < rows_here:
            at, left = sums + row * size, weights + row * SLAB
            if up_to(rows_here - row, few(dtypes)) < rows(dtypes):
                few_product(at, size, left, panels, width, slabs, adds, dtypes)
                row += few(dtypes)
            else:
                product(at, size, left, panels, width, slabs, adds, dtypes)
                row += rows(dtypes)


@fast
def scale_of(args, item):
    return args.scale * factor(args.key_scale, args.key_scale_head, item.kv_head)


@fast
def unit_of_logits(args, item):
    """What a row's numbers are multiplied by to be logits: they keep the scale out if they can."""
    scale = scale_of(args, item)
    plain = args.soft_cap == ZERO and args.slopes == 0 and args.bias == 0
    return scale if plain and scale > ZERO else ONE


@within
def weigh_row(args, dtypes, item, first, row, begin, end, hidden, room):
    """Turns a row's logits of a tile into weights, and scales its sums down if it must."""
    wide, count, unit = block(dtypes), end - begin, unit_of_logits(args, item)
    logits = room.logits + 4 * (KEYS * (row % wide) + begin)
    i, head = row // args.group, item.kv_head * args.group + row % args.group
    if unit == ONE:
        scale_row(logits, scale_of(args, item), count)
        apply_options(args, item, i, head, logits, first + begin, count)
    if hidden:
        low, high = seen_by(args, item, i, 1)
        hide(logits, low, high, first + begin, count)
        if args.depths != 0:
            hide_other_lines(args, item, logits, i, first + begin, count)
    weights = room.weights + (begin // depth(dtypes) * wide + row % wide) * SLAB
    totals = room.state.totals + row * SLAB
    done, top = False, get_float32(room.state.highest, row)
    if top == NONE and begin == 0:  # a row that sees the tile's first key: so in any block of rows
        top = get_float32(logits, 0)
        put_float32(room.state.highest, row, top)
    while not done:
        if top == NONE:
            top = raise_top(unit, row, highest_of(logits, count), room)
        shift, limit = ZERO if top == NONE else top, top + SLACK / unit
        log_unit = unit * FLOAT_LOG2_E
        done = set_weights(logits, weights, count, shift, limit, log_unit, totals, dtypes)
        top = NONE  # to be raised, if a logit was above the limit


@fast
def apply_options(args, item, i, head, logits, first, count):
    if args.soft_cap > ZERO:
        cap_logits(args.soft_cap, logits, count)
    if args.slopes == 0 and args.bias == 0:
        return
    bias = args.bias + (item.token + i) * args.bias_token + head * args.bias_head
    at = np.int64(0)
    while at < count:
        position, held = run_of(args, item, first + at, count - at)
        if args.slopes != 0:
            slope = get_float32(args.slopes, head)
            add_alibi_of_query(args, item, slope, logits + 4 * at, i, position, held)
        if args.bias != 0:
            columns_left = args.bias_columns - position
            add_bias(bias + 4 * position, logits + 4 * at, columns_left, held)
        at += held


@within
def raise_top(unit, row, highest, room):
    """Scales what a row has summed to its logits' new highest, and gives that."""
    state = room.state
    before = get_float32(state.highest, row)
    if before != NONE and highest > before:
        kept = exp((before - highest) * unit)
        scale_row(state.sums + row * room.sum_bytes, kept, room.sum_columns)
        scale_row(state.totals + row * SLAB, kept, LANES)
    put_float32(state.highest, row, highest)
    return highest

"""One tile of queries along the keys that they see: FlashAttention-2 (Dao, 2023) on packed pages.

A row's sums are scaled down only when its highest logit grows by more than SLACK, as in
FlashAttention-4: until then weights are above 1, which the division by their sum undoes.
"""

import numpy as np

from ..compiling import fast, within
from ..memory import get_float32, memset, put_float32, put_int64
from ..online_softmax import block_at, factor
from ..scalar_math import exp, log
from ..simd import LANES
from ..softmax import NONE, ONE, ZERO, add_alibi, add_bias, cap_logits, hide, key_range
from ..store_row import highest_of, narrow_row
from .micro_kernel import (
    LINE,
    PANEL,
    SLAB,
    add_product,
    block,
    columns,
    configure,
    depth,
    release,
    rows,
    set_product,
)
from .packing import pack_keys, pack_query, pack_values
from .room import GRAIN, KEYS, room_of, up_to
from .weights import LOG2_E, scale_row, set_weights, total_of

SLACK = np.float32(5.5)  # natural logarithm: weights up to 245
FLOAT_LOG2_E = np.float32(LOG2_E)


@within
def attend_tile(args, dtypes, item, scratch):
    """Computes and writes the rows of a work item of one KV head."""
    count = item.num_queries * args.group
    room = room_of(args, dtypes, count, scratch)
    configure(room.config, dtypes)
    load_queries(args, dtypes, item, count, room)
    clear(count, room)
    for first in range(item.first // KEYS * KEYS, item.last, KEYS):
        pack_tile(args, dtypes, item, first, room)
        for start in range(0, count, block(dtypes)):
            add_tile(args, dtypes, item, first, start, count, room)
    release(dtypes)
    write_rows(args, dtypes, item, count, room)


@within
def load_queries(args, dtypes, item, count, room):
    """The queries as A; what a block has beyond the item's rows is its last row once more."""
    wide = block(dtypes)
    for row in range(up_to(count, wide)):
        held = min(row, count - 1)
        token, head = item.token + held // args.group, item.kv_head * args.group + held % args.group
        source = args.query + token * args.query_token + head * args.query_head
        at = room.queries + row // wide * wide * room.query_bytes + row % wide * SLAB
        pack_query(source, at, args.head_dim, dtypes)


@fast
def clear(count, room):
    """Rows that have seen no key."""
    memset(room.sums, 0, count * room.sum_bytes)
    memset(room.totals, 0, count * SLAB)
    for row in range(count):
        put_float32(room.highest, row, NONE)


@within
def pack_tile(args, dtypes, item, first, room):
    """Packs what the item's rows see of the keys of a tile, and zeros up to whole grains."""
    begin, end = max(item.first - first, 0), min(item.last - first, KEYS)
    start, stop = begin // GRAIN * GRAIN, up_to(end, GRAIN)
    set_addresses(args, item, first, begin, end, room)
    if args.bias != 0:
        hide_values(args, item, first, begin, end, room)
    for key in range(start, stop, LANES):
        panels = room.key_panels + key // PANEL * room.key_panel_bytes + 4 * (key % PANEL)
        pack_keys(room.keys + 8 * key, panels, args.head_dim, dtypes)
    step = depth(dtypes) // LANES
    for key in range(start, stop, step):
        panels, width = room.value_panels + key // step * LINE, room.value_panel_bytes
        pack_values(room.values + 8 * key, panels, width, args.value_dim, dtypes)


@fast
def set_addresses(args, item, first, begin, end, room):
    """Those of the keys and values of a tile; of what the item does not see, those of zeros."""
    memset(room.zeros, 0, room.keys - room.zeros)
    for key in range(KEYS):
        put_int64(room.keys, key, room.zeros)
        put_int64(room.values, key, room.zeros)
    table = args.tables + item.seq * args.table_row
    keys, values = (
        args.key + item.kv_head * args.key_head,
        args.value + item.kv_head * args.value_head,
    )
    column = (first + begin) // args.block_size
    slot, held = first + begin - column * args.block_size, block_at(args, table, column)
    for key in range(begin, end):
        if slot == args.block_size:
            slot, column = np.int64(0), column + 1
            held = block_at(args, table, column)
        put_int64(room.keys, key, keys + held * args.key_block + slot * args.key_slot)
        put_int64(room.values, key, values + held * args.value_block + slot * args.value_slot)
        slot += 1


@fast
def hide_values(args, item, first, begin, end, room):
    """Zeros for values that a bias hides from all rows: what they hold may be NaN."""
    for key in range(KEYS):
        put_float32(room.shown, key, NONE)
    heads = args.group if args.bias_head != 0 else 1
    for i in range(item.num_queries):
        position = item.position + i
        low, high = key_range(args, item.seq_len, position, position)
        low, high = max(low - first, begin), min(high - first, end, args.bias_columns - first)
        bias = args.bias + (item.token + i) * args.bias_token + 4 * first
        bias += item.kv_head * args.group * args.bias_head
        for head in range(heads):
            note_shown(bias + head * args.bias_head, room.shown, low, high)
    for key in range(begin, end):
        if get_float32(room.shown, key) == NONE:
            put_int64(room.values, key, room.zeros)


@fast
def note_shown(bias, shown, low, high):
    for key in range(low, high):
        seen = get_float32(shown, key)
        put_float32(shown, key, seen if get_float32(bias, key) == NONE else ZERO)


@within
def add_tile(args, dtypes, item, first, start, count, room):
    """Adds a tile of keys to a block of rows, those from `start` on."""
    rows_here = min(block(dtypes), count - start)
    lowest = item.position + start // args.group
    highest = item.position + (start + rows_here - 1) // args.group
    begin, end = key_range(args, item.seq_len, lowest, highest)
    begin = max(begin - first, 0) // GRAIN * GRAIN
    end = up_to(min(end - first, KEYS), GRAIN)
    if begin < end:
        multiply_keys(dtypes, start, begin, end, room)
        for row in range(start, start + rows_here):
            weigh_row(args, dtypes, item, first, row, begin, end, room)
        multiply_values(dtypes, start, begin, end, room)


@within
def multiply_keys(dtypes, start, begin, end, room):
    """Sets the logits of a block of rows, without their scale."""
    for key in range(begin, end, columns(dtypes)):
        panels = room.key_panels + key // PANEL * room.key_panel_bytes
        for row in range(0, block(dtypes), rows(dtypes)):
            logits = room.logits + 4 * (KEYS * row + key)
            queries = room.queries + start * room.query_bytes + row * SLAB
            slabs = room.query_bytes // SLAB
            set_product(logits, 4 * KEYS, queries, panels, room.key_panel_bytes, slabs, dtypes)


@within
def multiply_values(dtypes, start, begin, end, room):
    """Adds the values, weighted, to the sums of a block of rows."""
    first, last = begin // depth(dtypes), end // depth(dtypes)
    for column in range(0, room.sum_columns, columns(dtypes)):
        panels = room.value_panels + column // PANEL * room.value_panel_bytes + first * LANES * LINE
        for row in range(0, block(dtypes), rows(dtypes)):
            sums = room.sums + (start + row) * room.sum_bytes + 4 * column
            weights = room.weights + (first * block(dtypes) + row) * SLAB
            width, slabs = room.value_panel_bytes, last - first
            add_product(sums, room.sum_bytes, weights, panels, width, slabs, dtypes)


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
def weigh_row(args, dtypes, item, first, row, begin, end, room):
    """Turns a row's logits of a tile into weights, and scales its sums down if it must."""
    wide, count, unit = block(dtypes), end - begin, unit_of_logits(args, item)
    logits = room.logits + 4 * (KEYS * (row % wide) + begin)
    i, head = row // args.group, item.kv_head * args.group + row % args.group
    if unit == ONE:
        scale_row(logits, scale_of(args, item), count)
        apply_options(args, item, i, head, logits, first + begin, count)
    hide(args, logits, item.position + i, item.seq_len, first + begin, count)
    raise_top(unit, row, highest_of(logits, count), room)
    top = get_float32(room.highest, row)
    shift = ZERO if top == NONE else top
    weights = room.weights + (begin // depth(dtypes) * wide + row % wide) * SLAB
    totals = room.totals + row * SLAB
    set_weights(logits, weights, count, shift, unit * FLOAT_LOG2_E, totals, dtypes)


@fast
def apply_options(args, item, i, head, logits, first, count):
    if args.soft_cap > ZERO:
        cap_logits(args.soft_cap, logits, count)
    if args.slopes != 0:
        add_alibi(get_float32(args.slopes, head), logits, item.position + i, first, count)
    if args.bias != 0:
        bias = args.bias + (item.token + i) * args.bias_token + head * args.bias_head
        add_bias(bias + 4 * first, logits, args.bias_columns - first, count)


@within
def raise_top(unit, row, highest, room):
    """Scales what a row has summed if its highest logit is too far above that of before."""
    before = get_float32(room.highest, row)
    if before == NONE:
        put_float32(room.highest, row, highest)
    elif (highest - before) * unit > SLACK:
        kept = exp((before - highest) * unit)
        scale_row(room.sums + row * room.sum_bytes, kept, room.sum_columns)
        scale_row(room.totals + row * SLAB, kept, LANES)
        put_float32(room.highest, row, highest)


@within
def write_rows(args, dtypes, item, count, room):
    """out and lse."""
    unit = unit_of_logits(args, item)
    scale = args.unit * factor(args.value_scale, args.value_scale_head, item.kv_head)
    for row in range(count):
        token, head = item.token + row // args.group, row % args.group
        index = token * args.num_kv_heads * args.group + item.kv_head * args.group + head
        total = total_of(room.totals + row * SLAB)
        over = ZERO if total == ZERO else ONE / total
        out = args.out + index * args.value_dim * args.itemsize
        narrow_row(room.sums + row * room.sum_bytes, over * scale, out, args.value_dim, dtypes)
        if args.lse != 0:
            lse = get_float32(room.highest, row) * unit + log(total)
            put_float32(args.lse, index, NONE if total == ZERO else lse)

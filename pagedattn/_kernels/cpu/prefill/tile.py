"""A tile of queries along the keys that they see: FlashAttention-2 (Dao, 2023) on packed pages."""

from ..call_args import APART, work_item_at
from ..compiling import fast, within
from ..listed import column_of, run_of, seen_by
from ..memory import add_at, get_float32, get_int64, memcpy, memset, put_float32, put_int64
from ..online_softmax import block_at, factor
from ..scalar_math import log
from ..simd import LANES
from ..softmax import NONE, ONE, ZERO, hide_other_lines
from ..store_row import narrow_row
from ..unpack import by_token, fetch_row, unpack_row, up_to
from .blocks import FLOAT_LOG2_E, add_tile, add_tile_of_heads, unit_of_logits
from .micro_kernel import LINE, PANEL, SLAB, block, configure, depth, in_place, release
from .packing import pack_keys, pack_query, pack_values
from .room import (
    ADDRESS_BYTES,
    GRAIN,
    ITEM_BYTES,
    KEYS,
    SEGMENT,
    keys_at,
    room_at,
    rooms_of,
    state_at,
    state_bytes,
    unpacked_bytes,
    values_at,
)
from .weights import join_row, total_of


@within
def attend_tile(args, dtypes, held, address, scratch):
    """Computes and writes the rows of the work item at an address.

    Each of its KV heads has a room, and in it an item of its own.
    """
    item = work_item_at(address)
    rooms = rooms_of(args, dtypes, held, item, scratch)
    configure(room_at(args, dtypes, held, rooms, 0).config, dtypes)
    begin = item.first // KEYS * KEYS if item.first < item.last else item.last
    for head in range(rooms.heads):
        begin_head(args, dtypes, held, address, begin, rooms, head)
    for first in range(begin, item.last, KEYS):
        prepare_tile(args, dtypes, held, first, rooms)
        add_keys(args, dtypes, held, first, rooms)
        if args.longest == 0 and item.parts == 1 and ends_segment(first, item.last):
            for head in range(rooms.heads):
                room = room_at(args, dtypes, held, rooms, head)
                join(args, work_item_at(room.item), rooms.rows, room.state, room)
                clear(rooms.rows, room.state, room)
    release(dtypes)
    finish(args, dtypes, held, item, rooms)


@within
def begin_head(args, dtypes, held, address, begin, rooms, head):
    """Sets up the room of one of an item's KV heads."""
    room = room_at(args, dtypes, held, rooms, head)
    memcpy(room.item, address, ITEM_BYTES)
    item = work_item_at(room.item)
    item.kv_head += head
    item.state += head * state_bytes(args, args.tile_tokens * args.group)
    load_queries(args, dtypes, item, rooms.rows, room)
    clear(rooms.rows, room.state, room)
    if args.longest == 0:
        clear(rooms.rows, room.joined, room)
    memset(room.zeros, 0, room.keys - room.zeros)
    if begin < item.last:
        find_keys(args, item, begin, room)


@within
def add_keys(args, dtypes, held, first, rooms):
    """Adds a tile of keys to all rows: those of several KV heads in the order of memory."""
    if rooms.heads > 1 and rooms.rows <= in_place(dtypes):
        add_tile_of_heads(args, dtypes, held, first, rooms)
        return
    for head in range(rooms.heads):
        room = room_at(args, dtypes, held, rooms, head)
        for start in range(0, rooms.rows, block(dtypes)):
            add_tile(args, dtypes, work_item_at(room.item), first, start, rooms.rows, room)


@within
def finish(args, dtypes, held, item, rooms):
    """Writes the rows, or keeps their states; whoever keeps the last ones joins and writes them."""
    for head in range(rooms.heads):
        if item.parts > 1:
            room = room_at(args, dtypes, held, rooms, head)
            keep_part(args, dtypes, work_item_at(room.item), rooms.rows, room)
    if item.parts > 1 and add_at(item.finished, 1) < item.parts - 1:
        return
    for head in range(rooms.heads):
        room = room_at(args, dtypes, held, rooms, head)
        of_head = work_item_at(room.item)
        if item.parts > 1:
            join_parts(args, dtypes, of_head, head, rooms, room)
        write_rows(args, dtypes, of_head, rooms.rows, room)


@within
def prepare_tile(args, dtypes, held, first, rooms):
    """Finds the keys of the next tile; packs those of this one unless they are read in place."""
    for head in range(rooms.heads):
        room = room_at(args, dtypes, held, rooms, head)
        item = work_item_at(room.item)
        if first + KEYS < item.last:
            find_keys(args, item, first + KEYS, room)
        if by_token(held):
            unpack_tile(args, held, item, first, room)
    if rooms.rows > in_place(dtypes):
        pack_tile(args, dtypes, held, first, rooms)


@fast
def ends_segment(first, last):
    return (first + KEYS) % SEGMENT == 0 or first + KEYS >= last


@fast
def join(args, item, count, state, room):
    """Adds a segment's state to that of those before it."""
    joined, factor = room.joined, unit_of_logits(args, item) * FLOAT_LOG2_E
    for row in range(count):
        top, before = get_float32(state.highest, row), get_float32(joined.highest, row)
        if top != NONE:
            highest = max(top, before)
            sums = row * room.sum_bytes
            scales = highest, before, top, factor
            join_row(joined.sums + sums, state.sums + sums, room.sum_columns, *scales)
            join_row(joined.totals + row * SLAB, state.totals + row * SLAB, LANES, *scales)
            put_float32(joined.highest, row, highest)


@fast
def keep_part(args, dtypes, item, count, room):
    """Copies the state of an item that is one of a sequence's parts to where it is kept."""
    kept, _ = state_at(args, dtypes, count, item.state)
    memcpy(kept.sums, room.state.sums, count * room.sum_bytes)
    memcpy(kept.highest, room.state.highest, 4 * count)
    memcpy(kept.totals, room.state.totals, count * SLAB)


@fast
def join_parts(args, dtypes, item, head, rooms, room):
    """Joins a KV head's states of all parts, which lie behind the counter of the finished ones."""
    size, first = state_bytes(args, args.tile_tokens * args.group), item.finished + APART
    for part in range(item.parts):
        at = first + (part * rooms.heads + head) * size
        kept, _ = state_at(args, dtypes, rooms.rows, at)
        join(args, item, rooms.rows, kept, room)


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
def clear(count, state, room):
    """Rows that have seen no key."""
    memset(state.sums, 0, count * room.sum_bytes)
    memset(state.totals, 0, count * SLAB)
    for row in range(count):
        put_float32(state.highest, row, NONE)


@fast
def find_keys(args, item, first, room):
    """The addresses of a tile's keys and values; of what the item does not see, those of zeros."""
    begin, end = seen_of(item, first)
    set_addresses(args, item, first, begin, end, room)
    if args.bias != 0:
        hide_values(args, item, first, begin, end, room)


@fast
def seen_of(item, first):
    """The keys of a tile that the item sees, counted from the tile's first one."""
    return max(item.first - first, 0), min(item.last - first, KEYS)


@within
def pack_tile(args, dtypes, held, first, rooms):
    """Packs what the item's rows see of the keys of a tile, and zeros up to whole grains.

    A grain of all KV heads after the other, as they lie in memory.
    """
    item = work_item_at(room_at(args, dtypes, held, rooms, 0).item)
    begin, end = seen_of(item, first)
    for grain in range(begin // GRAIN * GRAIN, up_to(end, GRAIN), GRAIN):
        for head in range(rooms.heads):
            room = room_at(args, dtypes, held, rooms, head)
            if first + grain + GRAIN < item.last:
                fetch_grain(args, first + grain + GRAIN, room)
            pack_grain(args, dtypes, first, grain, room)


@fast
def fetch_grain(args, first, room):
    """Asks for the cache lines of the keys and values of a grain."""
    at = ADDRESS_BYTES * (first % KEYS)
    keys, values = keys_at(room, first) + at, values_at(room, first) + at
    for key in range(GRAIN):
        fetch_row(get_int64(keys, key), args.head_dim * args.cache_itemsize)
        fetch_row(get_int64(values, key), args.value_dim * args.cache_itemsize)


@within
def pack_grain(args, dtypes, first, grain, room):
    keys, values = keys_at(room, first), values_at(room, first)
    for key in range(grain, grain + GRAIN, LANES):
        panels = room.key_panels + key // PANEL * room.key_panel_bytes + 4 * (key % PANEL)
        pack_keys(keys + ADDRESS_BYTES * key, panels, args.head_dim, dtypes)
    step = depth(dtypes) // LANES
    for key in range(grain, grain + GRAIN, step):
        panels, width = room.value_panels + key // step * LINE, room.value_panel_bytes
        pack_values(values + ADDRESS_BYTES * key, panels, width, args.value_dim, dtypes)


@fast
def set_addresses(args, item, first, begin, end, room):
    keys, values = keys_at(room, first), values_at(room, first)
    set_zeros(keys, values, 0, begin, room)
    set_zeros(keys, values, end, KEYS, room)
    table = args.tables + item.seq * args.table_row
    key_head = args.key + item.kv_head * args.key_head
    value_head = args.value + item.kv_head * args.value_head
    at = begin
    while at < end:
        index = (first + at) // args.block_size
        column = column_of(args, item, index)
        slot, held = first + at - index * args.block_size, block_at(args, table, column)
        key = key_head + held * args.key_block + slot * args.key_slot
        value = value_head + held * args.value_block + slot * args.value_slot
        stop = min(end, at + args.block_size - slot)
        for i in range(stop - at):
            put_int64(keys, at + i, key + i * args.key_slot)
            put_int64(values, at + i, value + i * args.value_slot)
        at = stop


@within
def unpack_tile(args, held, item, first, room):
    """Makes rows of the query's dtype of a tile's keys and values, which are read instead."""
    keys, values, size = keys_at(room, first), values_at(room, first), unpacked_bytes(args)
    table = args.tables + item.seq * args.table_row
    begin, end = seen_of(item, first)
    key, value = room.unpacked, room.unpacked + KEYS * size
    for at in range(begin, end):
        if at + GRAIN < end:
            fetch_row(get_int64(keys, at + GRAIN), args.head_dim * args.cache_itemsize)
            fetch_row(get_int64(values, at + GRAIN), args.value_columns * args.cache_itemsize)
        listed = (first + at) // args.block_size
        slot = first + at - listed * args.block_size
        column = column_of(args, item, listed)
        index = block_at(args, table, column) * args.block_size + slot
        index = index * args.num_kv_heads + item.kv_head
        source, dim, width = get_int64(keys, at), args.head_dim, args.itemsize
        unpack_row(source, args.key_scales, index, key, dim, width, held)
        put_int64(keys, at, key)
        source, dim = get_int64(values, at), args.value_columns
        if source != room.zeros:
            unpack_row(source, args.value_scales, index, value, dim, width, held)
            put_int64(values, at, value)
        key, value = key + size, value + size


@fast
def set_zeros(keys, values, begin, end, room):
    for key in range(begin, end):
        put_int64(keys, key, room.zeros)
        put_int64(values, key, room.zeros)


@fast
def hide_values(args, item, first, begin, end, room):
    """Zeros for values that a bias hides from all rows: what they hold may be NaN."""
    for key in range(KEYS):
        put_float32(room.shown, key, NONE)
    heads = args.group if args.bias_head != 0 else 1
    line = room.logits  # which hold nothing between tiles
    for i in range(item.num_queries):
        memset(line, 0, 4 * KEYS)
        if args.depths != 0:
            hide_other_lines(args, item, line, i, first, KEYS)
        low, high = seen_by(args, item, i, 1)
        low, high = max(low - first, begin), min(high - first, end)
        bias = args.bias + (item.token + i) * args.bias_token
        bias += item.kv_head * args.group * args.bias_head
        while low < high:
            position, held = run_of(args, item, first + low, high - low)
            stop = low + min(held, args.bias_columns - position)
            for head in range(heads):
                of_tile = bias + head * args.bias_head + 4 * (position - low)
                note_shown(of_tile, line, room.shown, low, stop)
            low += held
    for key in range(begin, end):
        if get_float32(room.shown, key) == NONE:
            put_int64(values_at(room, first), key, room.zeros)


@fast
def note_shown(bias, line, shown, low, high):
    for key in range(low, high):
        hidden = get_float32(bias, key) == NONE or get_float32(line, key) == NONE
        put_float32(shown, key, get_float32(shown, key) if hidden else ZERO)


@within
def write_rows(args, dtypes, item, count, room):
    """out and lse of what is joined; without segments, that is the state itself."""
    joined = room.joined
    unit = unit_of_logits(args, item)
    scale = args.unit * factor(args.value_scale, args.value_scale_head, item.kv_head)
    for row in range(count):
        token, head = item.token + row // args.group, row % args.group
        index = token * args.num_kv_heads * args.group + item.kv_head * args.group + head
        total = total_of(joined.totals + row * SLAB)
        over = ZERO if total == ZERO else ONE / total
        out = args.out + index * args.value_dim * args.itemsize
        narrow_row(joined.sums + row * room.sum_bytes, over * scale, out, args.value_dim, dtypes)
        if args.lse != 0:
            lse = get_float32(joined.highest, row) * unit + log(total)
            put_float32(args.lse, index, NONE if total == ZERO else lse)

"""A tile's keys and values: where they lie in the pages, made rows of the query's dtype, packed."""

from ..call_args import work_item_at
from ..chunk import block_at
from ..compiling import fast, within
from ..listed import column_of, run_of, seen_by
from ..memory import get_float32, get_int64, memset, put_float32, put_int64
from ..simd import LANES
from ..softmax import NONE, ZERO, hide_other_lines
from ..unpack import by_token, fetch_row, unpack_row, up_to
from .micro_kernel import LINE, PANEL, depth, in_place
from .packing import pack_keys, pack_values
from .room import ADDRESS_BYTES, GRAIN, KEYS, keys_at, room_at, unpacked_bytes, values_at


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
            fetch_row(get_int64(keys, at + GRAIN), args.key_head)
            fetch_row(get_int64(values, at + GRAIN), args.value_head)
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

"""A tile of queries along the keys that they see: FlashAttention-2 (Dao, 2023) on packed pages."""

from ..call_args import APART, work_item_at
from ..compiling import fast, within
from ..memory import add_at, get_float32, memcpy, memset, put_float32
from ..online_softmax import factor
from ..scalar_math import log
from ..simd import LANES
from ..softmax import NONE, ONE, ZERO
from ..store_row import narrow_row
from ..unpack import fetch_row, up_to
from .blocks import FLOAT_LOG2_E, add_tile, add_tile_of_heads, unit_of_logits
from .micro_kernel import SLAB, block, configure, in_place, release
from .packing import pack_query
from .pages import find_keys, prepare_tile
from .room import (
    ITEM_BYTES,
    KEYS,
    SEGMENT,
    room_at,
    rooms_of,
    state_at,
    state_bytes,
)
from .weights import join_row, total_of

AHEAD = 32  # rows of queries that are fetched while others are packed


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
                clear(dtypes, rooms.rows, room.state, room)
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
    clear(dtypes, rooms.rows, room.state, room)
    if args.longest == 0:
        clear(dtypes, rooms.rows, room.joined, room)
        memset(room.joined.sums, 0, rooms.rows * room.sum_bytes)
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
        fetch_row(query_at(args, item, min(row + AHEAD, count - 1)), args.head_dim * args.itemsize)
        at = room.queries + row // wide * wide * room.query_bytes + row % wide * SLAB
        pack_query(query_at(args, item, min(row, count - 1)), at, args.head_dim, dtypes)


@fast
def query_at(args, item, row):
    """The address of a row of an item."""
    token, head = item.token + row // args.group, item.kv_head * args.group + row % args.group
    return args.query + token * args.query_token + head * args.query_head


@fast
def clear(dtypes, count, state, room):
    """Rows that have seen no key: a first product of packed values sets their sums."""
    if count <= in_place(dtypes):
        memset(state.sums, 0, count * room.sum_bytes)
    memset(state.totals, 0, count * SLAB)
    for row in range(count):
        put_float32(state.highest, row, NONE)


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
        sums, over = joined.sums + row * room.sum_bytes, ZERO if total == ZERO else ONE / total
        if total == ZERO:  # no product has set them
            memset(sums, 0, room.sum_bytes)
        out = args.out + index * args.value_dim * args.itemsize
        narrow_row(sums, over * scale, out, args.value_dim, dtypes)
        if args.lse != 0:
            lse = get_float32(joined.highest, row) * unit + log(total)
            put_float32(args.lse, index, NONE if total == ZERO else lse)

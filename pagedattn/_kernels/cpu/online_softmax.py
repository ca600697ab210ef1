"""One sequence's queries along a range of its keys: the online softmax of Milakov & Gimelshein.

Keys come in chunks. Their logits are computed in the order in which keys lie in memory, all heads
of a few keys, and then values head by head. Meanwhile those to come are fetched into the cache:
keys some keys ahead, values a head ahead.
"""

from typing import NamedTuple

from . import pv_int4, pv_int4_as_bytes, qk_int4
from .chunk import clear_hidden, set_offsets, set_shown_values
from .compiling import fast, within
from .masking import mask_and_soften
from .memory import get_float32, get_int64, memcpy, memset, put_float32
from .pv_matmul import pv_1, pv_2, pv_4, set_weights
from .qk_matmul import qk_1, qk_2, qk_4, set_query
from .room import FOLLOWING, room_of
from .simd import KEYS, LANES
from .softmax import AHEAD, CHUNK, NONE, ONE
from .token_scales import gather_scales
from .unpack import (
    COLUMNS,
    by_token,
    fetch_row,
    group_of,
    is_packed,
    multiplies_int4_keys,
    scale_logits,
    scales_logits,
)
from .unpack_chunk import (
    clear_rows,
    set_unpacked_offsets,
    unpack_keys,
    unpack_values,
    unpacked_rows,
)

# Values that are added up before the next ones, a multiple of what a product takes. With AVX2 few
# are faster, as measured: a tile takes half a cache line of each row of bfloat16, and of 64 rows a
# power of two apart the first level has lost the first ones before their other halves are taken.
AT_ONCE = 16 if LANES == 8 else CHUNK
# Keys multiplied for one KV head before the next one's turn, for one tile of rows: with AVX2 one
# tile of keys is faster, as measured, for memory is read in its order. More rows would be loaded
# anew for each such tile.
TOGETHER = KEYS if LANES == 8 else AHEAD
# Values of four bits, by AVX-512's tables or as bytes.
add_int4_values = (pv_int4 if LANES == 16 else pv_int4_as_bytes).add_values


class State(NamedTuple):
    """Addresses of what the rows of a work item have summed up, `[heads, rows]`."""

    sums: int
    highest: int
    totals: int


class Coming(NamedTuple):
    """The values that are fetched while others are added: a plane, and byte offsets."""

    plane: int
    offsets: int


@within
def load_queries(args, dtypes, work_item, queries):
    """The queries as `qk_1` takes them, `[num_heads, num_queries, group, row]`."""
    row = queries
    for kv_head in range(work_item.kv_head, work_item.kv_head + work_item.num_heads):
        for i in range(work_item.num_queries):
            for head in range(kv_head * args.group, (kv_head + 1) * args.group):
                token = work_item.token + i
                source = args.query + token * args.query_token + head * args.query_head
                set_query(source, row, args.head_dim, dtypes)
                row += args.row_bytes


@within
def set_logits(args, dtypes, queries, rows, plane, offsets, count, scale, logits):
    """Logits `[rows, count]` of some keys, CHUNK apart."""
    step, dim, r = args.row_bytes, args.head_dim, 0
    while r + 4 <= rows:
        for k in range(0, count, KEYS):
            at, ahead, out = offsets + 8 * k, offsets + 8 * (k + AHEAD), logits + 4 * k
            qk_4(queries, step, plane, at, ahead, dim, scale, out, CHUNK, dtypes)
        r, queries, logits = r + 4, queries + 4 * step, logits + 16 * CHUNK
    if r + 2 <= rows:
        for k in range(0, count, KEYS):
            at, ahead, out = offsets + 8 * k, offsets + 8 * (k + AHEAD), logits + 4 * k
            qk_2(queries, step, plane, at, ahead, dim, scale, out, CHUNK, dtypes)
        r, queries, logits = r + 2, queries + 2 * step, logits + 8 * CHUNK
    if r < rows:
        for k in range(0, count, KEYS):
            at, ahead, out = offsets + 8 * k, offsets + 8 * (k + AHEAD), logits + 4 * k
            qk_1(queries, step, plane, at, ahead, dim, scale, out, CHUNK, dtypes)


@within
def add_values(args, dtypes, sums, rows, plane, offsets, coming, count, weights, kept):
    """`sums = sums * kept + weights @ values`, for the rows of a KV head, AT_ONCE values a time.

    `weights` are float32 or, where AT_ONCE is all of a chunk, become pairs; `kept` becomes 1.
    """
    for row in range(rows):
        set_weights(weights + 4 * row * CHUNK, CHUNK, dtypes)
    for k in range(0, count, AT_ONCE):
        few, later = min(AT_ONCE, count - k), Coming(coming.plane, coming.offsets + 8 * k)
        places, some = offsets + 8 * k, weights + 4 * k
        add_few_values(args, dtypes, sums, rows, plane, places, later, few, some, kept)
        for row in range(rows):
            put_float32(kept, row, ONE)


@within
def add_few_values(args, dtypes, sums, rows, plane, offsets, coming, count, weights, kept):
    """As `add_values`, of `count` values at once."""
    step, dim, r, (later, ahead) = args.row_bytes, args.value_dim, 0, coming
    while r + 4 <= rows:
        pv_4(sums, step, plane, offsets, later, ahead, count, dim, weights, CHUNK, kept, dtypes)
        r, sums, weights, kept = r + 4, sums + 4 * step, weights + 16 * CHUNK, kept + 16
    if r + 2 <= rows:
        pv_2(sums, step, plane, offsets, later, ahead, count, dim, weights, CHUNK, kept, dtypes)
        r, sums, weights, kept = r + 2, sums + 2 * step, weights + 8 * CHUNK, kept + 8
    if r < rows:
        pv_1(sums, step, plane, offsets, later, ahead, count, dim, weights, CHUNK, kept, dtypes)


@fast
def factor(scales, step, kv_head):
    """The scale of a KV head's keys or values, 1 without one; `step`: bytes to the next head's."""
    return get_float32(scales + kv_head * step, 0) if scales != 0 else ONE


@within
def attend(args, dtypes, held, work_item, queries, state, address):
    """Adds the keys of a work item to the state of its rows; `address`: scratch of `room_bytes`."""
    rows, heads = work_item.num_queries * args.group, work_item.num_heads
    room = room_of(args, held, rows, heads, address)
    begin(args, held, work_item, room)
    step = qk_int4.STEP if multiplies_int4_keys(args, held) else TOGETHER if rows <= 4 else AHEAD
    for first in range(work_item.first, work_item.last, CHUNK):
        count = min(CHUNK, work_item.last - first)
        next_chunk(args, held, work_item, first, room)
        for k in range(0, count, step):
            many = min(step, count - k)
            if by_token(held):
                fetch_scales(args, held, work_item, room.slots + FOLLOWING + 8 * k, many)
            for place in range(heads):
                multiply_keys(args, dtypes, held, work_item, queries, place, k, many, room)
        for place in range(heads):
            weigh(args, held, work_item, place, first, count, state, room)
            multiply_values(args, dtypes, held, work_item, place, count, state, room)


@within
def begin(args, held, work_item, room):
    """Sets what stays in the room, and finds the first chunk, as one that follows."""
    memset(room.zeros, 0, args.row_bytes)
    if is_packed(held):
        set_unpacked_offsets(args, room.key_scales)
    find_chunk(args, work_item, work_item.first, room)


@fast
def find_chunk(args, work_item, first, room):
    places = room.keys + FOLLOWING, room.values + FOLLOWING, room.slots + FOLLOWING
    set_offsets(args, work_item, first, min(CHUNK, work_item.last - first), *places)


@within
def next_chunk(args, held, work_item, first, room):
    """Takes the chunk that follows, with its scales, and finds the one behind it."""
    for offsets in (room.keys, room.values, room.slots):
        memcpy(offsets, offsets + FOLLOWING, FOLLOWING)
    if scales_logits(held):
        head, heads = work_item.kv_head, work_item.num_heads
        gather_scales(args.key_scales, head, heads, room.slots, room.key_scales)
        gather_scales(args.value_scales, head, heads, room.slots, room.value_scales)
    if first + CHUNK < work_item.last:
        find_chunk(args, work_item, first + CHUNK, room)


@within
def multiply_keys(args, dtypes, held, work_item, queries, place, k, count, room):
    """Logits of a KV head and of some keys of a chunk, from number k on."""
    head, rows = work_item.kv_head + place, room.rows
    row = queries + place * rows * args.row_bytes
    out = room.logits + place * room.head_bytes + 4 * k
    plane, offsets, slots = args.key + head * args.key_head, room.keys + 8 * k, room.slots + 8 * k
    scale = args.scale * factor(args.key_scale, args.key_scale_head, head)
    if multiplies_int4_keys(args, held):
        qk_int4.set_logits(args, row, rows, plane, offsets, slots, head, count, scale, out, room)
    else:
        if is_packed(held):
            unpack_keys(args, held, plane, offsets, slots, head, count, room.key_scales)
            plane, offsets = unpacked_rows(room.key_scales), room.key_scales
        set_logits(args, dtypes, row, rows, plane, offsets, count, scale, out)


@within
def weigh(args, held, work_item, place, first, count, state, room):
    """Turns a KV head's logits of a chunk into weights, times the scales of their values."""
    head, rows, logits = work_item.kv_head + place, room.rows, room.logits + place * room.head_bytes
    highest, totals = state.highest + 4 * place * rows, state.totals + 4 * place * rows
    if scales_logits(held):
        scale_rows(logits, room.key_scales + 4 * place * CHUNK, rows)
    for row in range(rows):
        for k in range(count, CHUNK):
            put_float32(logits, row * CHUNK + k, NONE)
    for k in range(CHUNK):
        put_float32(room.shown, k, NONE)
    rest = room.shown, highest, totals, room.kept
    mask_and_soften(args, work_item, head, first, count, logits, *rest)
    if scales_logits(held):
        scales = room.value_scales + 4 * place * CHUNK
        if args.bias != 0:
            clear_hidden(scales, room.shown)
        scale_rows(logits, scales, rows)


@fast
def scale_rows(logits, factors, rows):
    for row in range(rows):
        scale_logits(logits + 4 * row * CHUNK, factors, CHUNK)


@within
def multiply_values(args, dtypes, held, work_item, place, count, state, room):
    """Adds a chunk's values of a KV head, by their weights, to the sums of its rows."""
    head, weights = work_item.kv_head + place, room.logits + place * room.head_bytes
    sums = state.sums + place * room.rows * args.row_bytes
    coming = coming_of(args, work_item, place, room)
    plane, offsets = args.value + head * args.value_head, room.values
    if is_packed(held) and args.value_columns % COLUMNS == 0:
        add_int4_values(args, held, sums, plane, head, count, weights, coming, room)
        return
    if is_packed(held):
        unpack_values(args, held, plane, offsets, coming, room.slots, head, count, room.key_scales)
        if args.bias != 0:
            clear_rows(args, room.shown, count, room.key_scales)
        plane, offsets = unpacked_rows(room.key_scales), room.key_scales
        coming = Coming(plane, offsets)
    elif args.bias != 0:
        set_shown_values(offsets, room.zeros - plane, room.shown, room.shown_values)
        offsets = room.shown_values
    add_values(args, dtypes, sums, room.rows, plane, offsets, coming, count, weights, room.kept)


@fast
def coming_of(args, work_item, place, room):
    """The values of the next KV head; behind the last one, those of the next chunk's first."""
    later, heads = place + 1, work_item.num_heads
    head = work_item.kv_head + later % heads
    offsets = room.values + FOLLOWING * (later // heads)
    return Coming(args.value + head * args.value_head, offsets)


@within
def fetch_scales(args, held, work_item, slots, count):
    """Asks for the scales of some slots of the chunk to come; behind the last one, of its own."""
    heads = work_item.num_heads
    of_key = scale_bytes(args.head_dim, held)
    of_value = scale_bytes(args.value_columns, held)
    for k in range(count):
        row = get_int64(slots, k) + work_item.kv_head
        fetch_row(args.key_scales + row * of_key, heads * of_key)
        fetch_row(args.value_scales + row * of_value, heads * of_value)


@fast
def scale_bytes(dim, held):
    """Bytes of the scales of a token and a KV head."""
    return 2 * (dim // group_of(dim)) if is_packed(held) else 4

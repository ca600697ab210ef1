"""One sequence's queries along a range of its keys: the online softmax of Milakov & Gimelshein.

Keys come in chunks. Their logits are computed in the order in which keys lie in memory, all heads
of a few keys, and then values head by head. Meanwhile those to come are fetched into the cache.
"""

import numpy as np

from . import pv_fours, qk_fours
from .compiling import fast, within
from .listed import column_of
from .masking import mask_and_soften
from .memory import get_float32, get_int32, get_int64, memcpy, memset, put_float32, put_int64
from .pv_matmul import pv_1, pv_2, pv_4, set_weights
from .qk_matmul import qk_1, qk_2, qk_4, set_query
from .simd import KEYS, LINE
from .softmax import CHUNK, GROUP, NONE, ONE, ZERO
from .unpack import (
    COLUMNS,
    by_token,
    fetch_row,
    gather_scales,
    group_of,
    is_packed,
    scale_logits,
    scales_logits,
    takes_fours,
    up_to,
)
from .unpack_chunk import (
    clear_rows,
    rows_of,
    set_steps,
    steps_of,
    unpack_keys,
    unpack_values,
    unpacked_bytes,
)


@fast
def set_offsets(args, item, first, count, keys, values, slots):
    """The byte offsets of `count` keys and values of a sequence from key `first` on.

    And the numbers of their slots' first heads. From there to the end of the chunk they repeat the
    last one: tiles read nothing else.
    """
    table = args.tables + item.seq * args.table_row
    index = first // args.block_size
    slot = first - index * args.block_size
    block = block_at(args, table, column_of(args, item, index))
    for k in range(CHUNK):
        put_int64(keys, k, block * args.key_block + slot * args.key_slot)
        put_int64(values, k, block * args.value_block + slot * args.value_slot)
        put_int64(slots, k, (block * args.block_size + slot) * args.num_kv_heads)
        if k + 1 < count:
            slot += 1
            if slot == args.block_size:
                slot, index = np.int64(0), index + 1
                block = block_at(args, table, column_of(args, item, index))


@fast
def block_at(args, table, column):
    return min(max(np.int64(get_int32(table, column)), 0), args.num_blocks - 1)


@fast
def set_shown(offsets, away, shown):
    """Writes value offsets behind `shown`: a key's own, or `away`, to zeros, if no row sees it.

    What a slot holds that a bias hides from all may be NaN, which a weight of 0 would not undo.
    """
    for k in range(CHUNK):
        hidden = get_float32(shown, k) == NONE
        put_int64(shown + 8 * CHUNK, k, away if hidden else get_int64(offsets, k))


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
            at, ahead, out = offsets + 8 * k, offsets + 8 * (k + GROUP), logits + 4 * k
            qk_4(queries, step, plane, at, ahead, dim, scale, out, CHUNK, dtypes)
        r, queries, logits = r + 4, queries + 4 * step, logits + 16 * CHUNK
    if r + 2 <= rows:
        for k in range(0, count, KEYS):
            at, ahead, out = offsets + 8 * k, offsets + 8 * (k + GROUP), logits + 4 * k
            qk_2(queries, step, plane, at, ahead, dim, scale, out, CHUNK, dtypes)
        r, queries, logits = r + 2, queries + 2 * step, logits + 8 * CHUNK
    if r < rows:
        for k in range(0, count, KEYS):
            at, ahead, out = offsets + 8 * k, offsets + 8 * (k + GROUP), logits + 4 * k
            qk_1(queries, step, plane, at, ahead, dim, scale, out, CHUNK, dtypes)


@within
def add_values(args, dtypes, sums, rows, plane, offsets, later, ahead, count, weights, kept):
    """`sums = sums * kept + weights @ values`, for the rows of a KV head."""
    step, dim, r = args.row_bytes, args.value_dim, 0
    for row in range(rows):
        set_weights(weights + 4 * row * CHUNK, CHUNK, dtypes)
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
    """The scale that a KV head's keys or values are held without."""
    return get_float32(scales + kv_head * step, 0) if scales != 0 else ONE


@within
def attend(args, dtypes, held, work_item, queries, sums, highest, total, room):
    """Adds the keys of a work item to the state of its rows; `room` is scratch of `room_bytes`.

    Offsets are those of a chunk and of the next one: keys are fetched some keys ahead, values
    a head ahead.
    """
    rows, heads = work_item.num_queries * args.group, work_item.num_heads
    head_bytes = 4 * CHUNK * rows
    keys, values, slots = room, room + 16 * CHUNK, room + 32 * CHUNK
    shown = room + 48 * CHUNK
    shown_values = shown + 8 * CHUNK
    zeros = shown_values + 8 * CHUNK
    logits = zeros + args.row_bytes
    kept = logits + heads * head_bytes
    tokens = kept + up_to(4 * rows, LINE)
    memset(zeros, 0, args.row_bytes)
    if is_packed(held):
        set_steps(args, tokens)
    count = min(CHUNK, work_item.last - work_item.first)
    following = 8 * CHUNK
    places = keys + following, values + following, slots + following
    set_offsets(args, work_item, work_item.first, count, *places)
    for first in range(work_item.first, work_item.last, CHUNK):
        memcpy(keys, keys + 8 * CHUNK, 8 * CHUNK)
        memcpy(values, values + 8 * CHUNK, 8 * CHUNK)
        memcpy(slots, slots + 8 * CHUNK, 8 * CHUNK)
        count = min(CHUNK, work_item.last - first)
        left = min(CHUNK, work_item.last - first - CHUNK)
        if left > 0:
            set_offsets(args, work_item, first + CHUNK, left, *places)
            if by_token(held):
                fetch_scales(args, held, work_item, places[2])
        for k in range(0, count, GROUP):
            at, many = keys + 8 * k, min(GROUP, count - k)
            for place in range(heads):
                head = work_item.kv_head + place
                row, out = (
                    queries + place * rows * args.row_bytes,
                    logits + place * head_bytes + 4 * k,
                )
                plane, offsets = args.key + head * args.key_head, at
                scale = args.scale * factor(args.key_scale, args.key_scale_head, head)
                if takes_fours(args, held):
                    qk_fours.set_logits(
                        args, row, rows, plane, at, slots + 8 * k, head, many, scale, out
                    )
                    continue
                if is_packed(held):
                    unpack_keys(args, held, plane, at, slots + 8 * k, head, many, tokens)
                    plane, offsets = rows_of(tokens), steps_of(tokens)
                set_logits(args, dtypes, row, rows, plane, offsets, many, scale, out)
        for place in range(heads):
            head = work_item.kv_head + place
            own, tops = logits + place * head_bytes, highest + 4 * place * rows
            totals, out = total + 4 * place * rows, sums + place * rows * args.row_bytes
            if scales_logits(held):
                gather_scales(args.key_scales, head, slots, CHUNK, tokens)
                for r in range(rows):
                    scale_logits(own + 4 * r * CHUNK, tokens, CHUNK)
            for r in range(rows):
                for k in range(count, CHUNK):
                    put_float32(own, r * CHUNK + k, NONE)
            for k in range(CHUNK):
                put_float32(shown, k, NONE)
            mask_and_soften(args, work_item, head, first, count, own, shown, tops, totals, kept)
            value, at = args.value + head * args.value_head, values
            if args.bias != 0:
                set_shown(values, zeros - value, shown)
                at = shown_values
            if scales_logits(held):
                gather_scales(args.value_scales, head, slots, CHUNK, tokens)
                if args.bias != 0:
                    clear_hidden(tokens, shown)
                for r in range(rows):
                    scale_logits(own + 4 * r * CHUNK, tokens, CHUNK)
            later = place + 1
            ahead = values + 8 * CHUNK * (later // heads)
            plane = args.value + (work_item.kv_head + later % heads) * args.value_head
            if pv_fours.sums_fours(held) and args.value_columns % COLUMNS == 0:
                seen = shown if args.bias != 0 else np.int64(0)
                room_of_head = rows_of(tokens)
                pv_fours.add_values(
                    args,
                    held,
                    out,
                    rows,
                    value,
                    values,
                    plane,
                    ahead,
                    slots,
                    head,
                    count,
                    own,
                    kept,
                    seen,
                    room_of_head,
                )
                continue
            if is_packed(held):
                unpack_values(args, held, value, values, plane, ahead, slots, head, count, tokens)
                if args.bias != 0:
                    clear_rows(args, shown, count, tokens)
                value, at, plane, ahead = (
                    *(rows_of(tokens), steps_of(tokens)),
                    *(rows_of(tokens), steps_of(tokens)),
                )
            add_values(args, dtypes, out, rows, value, at, plane, ahead, count, own, kept)


@within
def fetch_scales(args, held, work_item, slots):
    """Asks for the scales of a chunk's keys and values."""
    heads = work_item.num_heads
    of_key = scale_bytes(args.head_dim, held)
    of_value = scale_bytes(args.value_columns, held)
    for k in range(CHUNK):
        row = get_int64(slots, k) + work_item.kv_head
        fetch_row(args.key_scales + row * of_key, heads * of_key)
        fetch_row(args.value_scales + row * of_value, heads * of_value)


@fast
def scale_bytes(dim, held):
    """Bytes of the scales of a token and a KV head."""
    return 2 * (dim // group_of(dim)) if is_packed(held) else 4


@fast
def clear_hidden(factors, shown):
    """Scales of values that a bias hides from all may be NaN: 0 for them."""
    for k in range(CHUNK):
        hidden = get_float32(shown, k) == NONE
        put_float32(factors, k, ZERO if hidden else get_float32(factors, k))


@fast
def room_bytes(args, rows, held):
    """The scratch that `attend` needs, for this many rows of a KV head."""
    size = 64 * CHUNK + args.row_bytes + 4 * rows * args.num_kv_heads * CHUNK
    size += up_to(4 * rows, LINE)
    if scales_logits(held):
        size += 4 * CHUNK
    if is_packed(held):
        size += 16 * CHUNK + CHUNK * unpacked_bytes(args)
    return size

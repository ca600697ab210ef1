"""One sequence's queries along a range of its keys: the online softmax of Milakov & Gimelshein.

Keys come in chunks. Their logits are computed in the order in which keys lie in memory, all heads
of a few keys, and then values head by head. Meanwhile those to come are fetched into the cache.
"""

import numpy as np

from .compiling import fast, within
from .memory import get_float32, get_int32, get_int64, memcpy, memset, put_float32, put_int64
from .pv_matmul import mix_1, mix_2, mix_4, set_weights
from .qk_matmul import dots_1, dots_2, dots_4, set_query
from .simd import KEYS
from .softmax import CHUNK, NONE, ONE, mask_and_soften

GROUP = 4 * KEYS  # keys whose logits are computed head by head; those of the next are fetched


@fast
def set_offsets(job, table, first, count, keys, values):
    """The byte offsets of `count` keys and values of a sequence from key `first` on.

    From there to the end of the chunk they repeat the last one: tiles read nothing else.
    """
    column = first // job.block_size
    slot = first - column * job.block_size
    block = block_at(job, table, column)
    for k in range(CHUNK):
        put_int64(keys, k, block * job.key_block + slot * job.key_slot)
        put_int64(values, k, block * job.value_block + slot * job.value_slot)
        if k + 1 < count:
            slot += 1
            if slot == job.block_size:
                slot, column = np.int64(0), column + 1
                block = block_at(job, table, column)


@fast
def block_at(job, table, column):
    return min(max(np.int64(get_int32(table, column)), 0), job.num_blocks - 1)


@fast
def set_shown(offsets, away, shown):
    """Writes value offsets behind `shown`: a key's own, or `away`, to zeros, if no row sees it.

    What a slot holds that a bias hides from all may be NaN, which a weight of 0 would not undo.
    """
    for k in range(CHUNK):
        hidden = get_float32(shown, k) == NONE
        put_int64(shown + 8 * CHUNK, k, away if hidden else get_int64(offsets, k))


@within
def load_queries(job, kinds, piece, queries):
    """The queries as `dots` takes them, `[num_kv_heads, num_queries, group, row]`."""
    row = queries
    for kv_head in range(job.num_kv_heads):
        for i in range(piece.num_queries):
            for head in range(kv_head * job.group, (kv_head + 1) * job.group):
                token = piece.token + i
                source = job.query + token * job.query_token + head * job.query_head
                set_query(source, row, job.head_dim, kinds)
                row += job.row_bytes


@within
def set_logits(job, kinds, queries, rows, plane, offsets, count, scale, logits):
    """Logits `[rows, count]` of some keys, CHUNK apart."""
    step, dim, r = job.row_bytes, job.head_dim, 0
    while r + 4 <= rows:
        for k in range(0, count, KEYS):
            at, ahead, out = offsets + 8 * k, offsets + 8 * (k + GROUP), logits + 4 * k
            dots_4(queries, step, plane, at, ahead, dim, scale, out, CHUNK, kinds)
        r, queries, logits = r + 4, queries + 4 * step, logits + 16 * CHUNK
    if r + 2 <= rows:
        for k in range(0, count, KEYS):
            at, ahead, out = offsets + 8 * k, offsets + 8 * (k + GROUP), logits + 4 * k
            dots_2(queries, step, plane, at, ahead, dim, scale, out, CHUNK, kinds)
        r, queries, logits = r + 2, queries + 2 * step, logits + 8 * CHUNK
    if r < rows:
        for k in range(0, count, KEYS):
            at, ahead, out = offsets + 8 * k, offsets + 8 * (k + GROUP), logits + 4 * k
            dots_1(queries, step, plane, at, ahead, dim, scale, out, CHUNK, kinds)


@within
def add_values(job, kinds, sums, rows, plane, offsets, later, ahead, count, weights, kept):
    """`sums = sums * kept + weights @ values`, for the rows of a KV head."""
    step, dim, r = job.row_bytes, job.value_dim, 0
    for row in range(rows):
        set_weights(weights + 4 * row * CHUNK, CHUNK, kinds)
    while r + 4 <= rows:
        mix_4(sums, step, plane, offsets, later, ahead, count, dim, weights, CHUNK, kept, kinds)
        r, sums, weights, kept = r + 4, sums + 4 * step, weights + 16 * CHUNK, kept + 16
    if r + 2 <= rows:
        mix_2(sums, step, plane, offsets, later, ahead, count, dim, weights, CHUNK, kept, kinds)
        r, sums, weights, kept = r + 2, sums + 2 * step, weights + 8 * CHUNK, kept + 8
    if r < rows:
        mix_1(sums, step, plane, offsets, later, ahead, count, dim, weights, CHUNK, kept, kinds)


@fast
def factor(scales, step, kv_head):
    """The scale that a KV head's keys or values are held without."""
    return get_float32(scales + kv_head * step, 0) if scales != 0 else ONE


@within
def attend(job, kinds, piece, queries, sums, highest, total, room):
    """Adds the keys of a piece to the state of its rows; `room` is scratch of `room_bytes`.

    Offsets are those of a chunk and of the next one: keys are fetched some keys ahead, values
    a head ahead.
    """
    rows, heads = piece.num_queries * job.group, job.num_kv_heads
    head_bytes = 4 * CHUNK * rows
    keys, values = room, room + 16 * CHUNK
    shown = room + 32 * CHUNK
    shown_values = shown + 8 * CHUNK
    zeros = shown_values + 8 * CHUNK
    logits = zeros + job.row_bytes
    kept = logits + heads * head_bytes
    memset(zeros, 0, job.row_bytes)
    table = job.tables + piece.seq * job.table_row
    count = min(CHUNK, piece.last - piece.first)
    set_offsets(job, table, piece.first, count, keys + 8 * CHUNK, values + 8 * CHUNK)
    for first in range(piece.first, piece.last, CHUNK):
        memcpy(keys, keys + 8 * CHUNK, 8 * CHUNK)
        memcpy(values, values + 8 * CHUNK, 8 * CHUNK)
        count = min(CHUNK, piece.last - first)
        following = min(CHUNK, piece.last - first - CHUNK)
        if following > 0:
            after = first + CHUNK
            set_offsets(job, table, after, following, keys + 8 * CHUNK, values + 8 * CHUNK)
        for k in range(0, count, GROUP):
            at, many = keys + 8 * k, min(GROUP, count - k)
            for head in range(heads):
                row, out = queries + head * rows * job.row_bytes, logits + head * head_bytes + 4 * k
                plane = job.key + head * job.key_head
                scale = job.scale * factor(job.key_scale, job.key_scale_head, head)
                set_logits(job, kinds, row, rows, plane, at, many, scale, out)
        for head in range(heads):
            own, tops = logits + head * head_bytes, highest + 4 * head * rows
            totals, out = total + 4 * head * rows, sums + head * rows * job.row_bytes
            for r in range(rows):
                for k in range(count, CHUNK):
                    put_float32(own, r * CHUNK + k, NONE)
            for k in range(CHUNK):
                put_float32(shown, k, NONE)
            mask_and_soften(job, piece, head, first, count, own, shown, tops, totals, kept)
            value, at = job.value + head * job.value_head, values
            if job.bias != 0:
                set_shown(values, zeros - value, shown)
                at = shown_values
            later = head + 1
            ahead = values + 8 * CHUNK * (later // heads)
            plane = job.value + (later % heads) * job.value_head
            add_values(job, kinds, out, rows, value, at, plane, ahead, count, own, kept)


@fast
def room_bytes(job, rows):
    """The scratch that `attend` needs, for this many rows of a KV head."""
    return 48 * CHUNK + job.row_bytes + 4 * rows * (job.num_kv_heads * CHUNK + 1)

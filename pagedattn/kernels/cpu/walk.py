"""One sequence's queries along a range of its keys: the online softmax of Milakov & Gimelshein.

Keys come in chunks. Of a chunk all heads are taken one after the other, as they lie in memory, so
that a block is read in a row, while the next chunk is fetched into the cache.
"""

import numpy as np

from .compiling import fast, within
from .dots import dots_1, dots_2, dots_4, set_query
from .lanes import KEYS
from .memory import get_float32, get_int32, get_int64, memset, put_float32, put_int64
from .mix import mix_1, mix_2, mix_4
from .weights import CHUNK, NONE, mask_and_soften


@fast
def set_offsets(job, table, first, count, keys, values):
    """The byte offsets of `count` keys and values of a sequence from key `first` on.

    From there to the end of the chunk they repeat the last one: tiles read nothing else.
    """
    for k in range(CHUNK):
        position = first + min(k, count - 1)
        column = position // job.block_size
        slot = position - column * job.block_size
        block = min(max(np.int64(get_int32(table, column)), 0), job.num_blocks - 1)
        put_int64(keys, k, block * job.key_block + slot * job.key_slot)
        put_int64(values, k, block * job.value_block + slot * job.value_slot)


@fast
def set_ahead(plane, offsets, head_stride, num_heads, ahead):
    """The addresses of all heads of a chunk's slots, in the order in which they lie in memory."""
    for k in range(CHUNK):
        row = plane + get_int64(offsets, k)
        for head in range(num_heads):
            put_int64(ahead, k * num_heads + head, row + head * head_stride)


@fast
def set_shown(offsets, away, shown):
    """Turns `shown` into value offsets; a key that no row sees gets `away`, where zeros are.

    What a slot holds that a bias hides from all may be NaN, which a weight of 0 would not undo.
    """
    for k in range(CHUNK):
        hidden = get_float32(shown, k) == NONE
        put_int64(shown + 8 * CHUNK, k, away if hidden else get_int64(offsets, k))


@within
def load_queries(job, query_kind, kind, piece, queries):
    """The queries as `dots` takes them, `[num_kv_heads, num_queries, group, row]`."""
    row = queries
    for kv_head in range(job.num_kv_heads):
        for i in range(piece.num_queries):
            for head in range(kv_head * job.group, (kv_head + 1) * job.group):
                token = piece.token + i
                source = job.query + token * job.query_token + head * job.query_head
                set_query(source, row, job.head_dim, query_kind, kind)
                row += job.row_bytes


@within
def set_logits(job, kind, queries, rows, plane, offsets, ahead, count, logits):
    """Logits `[rows, CHUNK]` of the keys of a chunk; -inf past the last one."""
    step, dim, scale = job.row_bytes, job.head_dim, job.scale
    for k in range(0, count, KEYS):
        r, at, later = 0, offsets + 8 * k, ahead + 8 * k
        row, out = queries, logits + 4 * k
        while r + 4 <= rows:
            dots_4(row, step, plane, at, later, dim, scale, out, CHUNK, kind)
            r, row, out = r + 4, row + 4 * step, out + 16 * CHUNK
        if r + 2 <= rows:
            dots_2(row, step, plane, at, later, dim, scale, out, CHUNK, kind)
            r, row, out = r + 2, row + 2 * step, out + 8 * CHUNK
        if r < rows:
            dots_1(row, step, plane, at, later, dim, scale, out, CHUNK, kind)
    for r in range(rows):
        for k in range(count, CHUNK):
            put_float32(logits, r * CHUNK + k, NONE)


@within
def add_values(job, kind, sums, rows, plane, offsets, ahead, count, weights, kept):
    """`sums = sums * kept + weights @ values`, for the rows of a KV head."""
    step, dim, r = job.row_bytes, job.value_dim, 0
    while r + 4 <= rows:
        mix_4(sums, step, plane, offsets, ahead, count, dim, weights, CHUNK, kept, kind)
        r, sums, weights, kept = r + 4, sums + 4 * step, weights + 16 * CHUNK, kept + 16
    if r + 2 <= rows:
        mix_2(sums, step, plane, offsets, ahead, count, dim, weights, CHUNK, kept, kind)
        r, sums, weights, kept = r + 2, sums + 2 * step, weights + 8 * CHUNK, kept + 8
    if r < rows:
        mix_1(sums, step, plane, offsets, ahead, count, dim, weights, CHUNK, kept, kind)


@within
def attend(job, kind, piece, queries, sums, highest, total, room):
    """Adds the keys of a piece to the state of its rows; `room` is scratch of `room_bytes`."""
    rows, heads = piece.num_queries * job.group, job.num_kv_heads
    keys, values = room, room + 8 * CHUNK
    next_keys, next_values = room + 16 * CHUNK, room + 24 * CHUNK
    shown = room + 32 * CHUNK
    shown_values = shown + 8 * CHUNK
    ahead_keys = shown_values + 8 * CHUNK
    ahead_values = ahead_keys + 8 * CHUNK * heads
    zeros = ahead_values + 8 * CHUNK * heads
    kept = zeros + job.row_bytes
    logits = kept + 4 * rows
    memset(zeros, 0, job.row_bytes)
    table = job.tables + piece.seq * job.table_row
    count = min(CHUNK, piece.last - piece.first)
    set_offsets(job, table, piece.first, count, next_keys, next_values)
    for first in range(piece.first, piece.last, CHUNK):
        keys, next_keys = next_keys, keys
        values, next_values = next_values, values
        count = min(CHUNK, piece.last - first)
        following = min(CHUNK, piece.last - first - CHUNK)
        if following > 0:
            set_offsets(job, table, first + CHUNK, following, next_keys, next_values)
            set_ahead(job.key, next_keys, job.key_head, heads, ahead_keys)
            set_ahead(job.value, next_values, job.value_head, heads, ahead_values)
        elif first == piece.first:
            set_ahead(job.key, keys, job.key_head, heads, ahead_keys)
            set_ahead(job.value, values, job.value_head, heads, ahead_values)
        for head in range(heads):
            skip, later = head * rows, 8 * head * CHUNK
            key, value = job.key + head * job.key_head, job.value + head * job.value_head
            tops, totals = highest + 4 * skip, total + 4 * skip
            row, out = queries + skip * job.row_bytes, sums + skip * job.row_bytes
            set_logits(job, kind, row, rows, key, keys, ahead_keys + later, count, logits)
            for k in range(CHUNK):
                put_float32(shown, k, NONE)
            mask_and_soften(job, piece, head, first, count, logits, shown, tops, totals, kept)
            at = values
            if job.bias != 0:
                set_shown(values, zeros - value, shown)
                at = shown_values
            later += ahead_values
            add_values(job, kind, out, rows, value, at, later, count, logits, kept)


@fast
def room_bytes(job, rows):
    """The scratch that `attend` needs, for this many rows of a KV head."""
    offsets = (6 + 2 * job.num_kv_heads) * 8 * CHUNK
    return offsets + job.row_bytes + 4 * rows * (CHUNK + 1)

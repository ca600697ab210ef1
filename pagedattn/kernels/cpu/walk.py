"""One sequence's queries along a range of its keys: the online softmax of Milakov & Gimelshein.

Keys come in chunks. Of a chunk all heads are taken one after the other, as they lie in memory, so
that a block is read in a row, while the next chunk is fetched into the cache.
"""

import numpy as np

from .compiling import fast, within
from .memory import get_float32, get_int32, get_int64, put_float32, put_int64
from .numbers import exp, tanh
from .vectors import KEYS, dots_1, dots_2, dots_4, highest_of, mix_1, mix_2, mix_4, set_query

CHUNK = 32  # keys; a multiple of KEYS
NONE = np.float32(-np.inf)
ZERO = np.float32(0)


@fast
def key_range(job, seq_len, lowest, highest):
    """The keys that any query from position `lowest` to `highest` may see."""
    first = max(np.int64(0), lowest - job.window + 1)
    reach = np.int64(1) if job.causal else job.window
    return first, max(first, min(seq_len, highest + reach))


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


@within
def load_queries(job, kind, piece, queries):
    """The queries as `dots` takes them, `[num_kv_heads, num_queries, group, row]`."""
    row = queries
    for kv_head in range(job.num_kv_heads):
        for i in range(piece.num_queries):
            for head in range(kv_head * job.group, (kv_head + 1) * job.group):
                token = piece.token + i
                source = job.query + token * job.query_token + head * job.query_head
                set_query(source, row, job.head_dim, kind)
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
    step, dim, r = job.row_bytes, job.head_dim, 0
    while r + 4 <= rows:
        mix_4(sums, step, plane, offsets, ahead, count, dim, weights, CHUNK, kept, kind)
        r, sums, weights, kept = r + 4, sums + 4 * step, weights + 16 * CHUNK, kept + 16
    if r + 2 <= rows:
        mix_2(sums, step, plane, offsets, ahead, count, dim, weights, CHUNK, kept, kind)
        r, sums, weights, kept = r + 2, sums + 2 * step, weights + 8 * CHUNK, kept + 8
    if r < rows:
        mix_1(sums, step, plane, offsets, ahead, count, dim, weights, CHUNK, kept, kind)


@fast
def cap_logits(cap, logits, count):
    for k in range(count):
        put_float32(logits, k, cap * tanh(get_float32(logits, k) / cap))


@fast
def add_alibi(slope, logits, position, first, count):
    for k in range(count):
        apart = np.float32(np.int32(abs(position - first - k)))
        put_float32(logits, k, get_float32(logits, k) - slope * apart)


@fast
def hide(job, logits, position, seq_len, first, count):
    """-inf at the keys of a chunk that a query may not see."""
    begin, end = key_range(job, seq_len, position, position)
    for k in range(min(max(begin - first, 0), count)):
        put_float32(logits, k, NONE)
    for k in range(max(end - first, 0), count):
        put_float32(logits, k, NONE)


@fast
def soften(logits, highest, total, kept, row):
    """Turns a row's logits into weights; updates its highest logit and its sum of weights."""
    before = get_float32(highest, row)
    top = max(before, highest_of(logits, CHUNK))
    shift = ZERO if top == NONE else top
    summed = ZERO
    for k in range(CHUNK):
        weight = exp(get_float32(logits, k) - shift)
        put_float32(logits, k, weight)
        summed += weight
    factor = exp(before - shift)
    put_float32(highest, row, top)
    put_float32(total, row, get_float32(total, row) * factor + summed)
    put_float32(kept, row, factor)


@fast
def mask_and_soften(job, piece, kv_head, first, count, logits, highest, total, kept):
    """From logits of a chunk and a KV head to weights."""
    context = piece.seq_len - piece.num_queries
    for i in range(piece.num_queries):
        for g in range(job.group):
            row = i * job.group + g
            at = logits + 4 * row * CHUNK
            if job.soft_cap > ZERO:
                cap_logits(job.soft_cap, at, count)
            if job.slopes != 0:
                slope = get_float32(job.slopes, kv_head * job.group + g)
                add_alibi(slope, at, context + i, first, count)
            if piece.num_queries > 1:
                hide(job, at, context + i, piece.seq_len, first, count)
            soften(at, highest, total, kept, row)


@within
def attend(job, kind, piece, queries, sums, highest, total, room):
    """Adds the keys of a piece to the state of its rows; `room` is scratch of `room_bytes`."""
    rows, heads = piece.num_queries * job.group, job.num_kv_heads
    keys, values = room, room + 8 * CHUNK
    next_keys, next_values = room + 16 * CHUNK, room + 24 * CHUNK
    ahead_keys = room + 32 * CHUNK
    ahead_values = ahead_keys + 8 * CHUNK * heads
    kept = ahead_values + 8 * CHUNK * heads
    logits = kept + 4 * rows
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
            mask_and_soften(job, piece, head, first, count, logits, tops, totals, kept)
            later += ahead_values
            add_values(job, kind, out, rows, value, values, later, count, logits, kept)


@fast
def room_bytes(rows, num_kv_heads):
    """The scratch that `attend` needs, for this many rows of a KV head."""
    return 32 * CHUNK + 16 * CHUNK * num_kv_heads + 4 * rows * (CHUNK + 1)

"""Scores of blocks by their summaries: the greatest product of any query, some blocks at a time.

The struct of a call says what there is: `key` and `value` are the summaries' planes (`num_planes`
of them), `tables` the block of each column, -1 for none, `group` the most queries of a sequence and
KV head, `[num_planes, num_seqs, group, num_kv_heads, head_dim]`, and `seq_lens` how many of these a
sequence has.
"""

from .call_args import APART, args_at, offset
from .chunk import block_at
from .compiling import fast, within
from .memory import (
    add_at,
    aligned_alloc,
    free,
    get_float32,
    get_int32,
    put_float32,
    put_int64,
)
from .online_softmax import set_logits
from .qk_matmul import qk_of_two_1, qk_of_two_2, qk_of_two_4, set_query
from .schedule import begin_alike
from .simd import KEYS, LANES
from .softmax import AHEAD, CHUNK, NONE

CLAIMED, DONE = map(offset, ("claimed", "done"))


@fast
def begin_scores(call):
    """The address of new arguments with the fields of the given ones; an item is a chunk."""
    given, columns = args_at(call), 2 * LANES
    read = given.num_planes * given.num_seqs * given.max_blocks * given.key_block
    address = begin_alike(call, given.num_seqs * chunks_of(given), read)
    args_at(address).row_bytes = given.num_planes * 4 * columns * -(-given.head_dim // columns)
    return address


@fast
def chunks_of(args):
    return -(-args.max_blocks // CHUNK)


@within
def work_on_scores(address, dtypes):
    """Works on chunks until none is left to begin."""
    args, room = args_at(address), 0
    number = add_at(address + CLAIMED, 1)
    while number < args.num_items:
        if room == 0:
            room = aligned_alloc(APART, room_bytes(args))
        score_chunk(args, dtypes, number, room)
        add_at(address + DONE, 1)
        number = add_at(address + CLAIMED, 1)
    if room != 0:
        free(room)


@fast
def room_bytes(args):
    """Byte offsets of two chunks, and queries and products of all heads."""
    rows = args.num_kv_heads * args.group
    return APART * -(-(16 * CHUNK + rows * (args.row_bytes + 4 * CHUNK)) // APART)


@within
def score_chunk(args, dtypes, number, room):
    """Writes the scores of a chunk of columns of a sequence, for every KV head.

    All heads of a few blocks at a time, as they lie in memory, while the next ones are fetched.
    """
    seq, first = number // chunks_of(args), number % chunks_of(args) * CHUNK
    rows = min(max(0, get_int32(args.seq_lens, seq)), args.group)
    count = min(CHUNK, args.max_blocks - first)
    blocks = args.tables + seq * args.table_row + 4 * first
    queries = room + 16 * CHUNK
    products = queries + args.num_kv_heads * args.group * args.row_bytes
    set_offsets(args, blocks, args.max_blocks - first, room)
    load_queries(args, dtypes, seq, rows, queries)
    for k in range(0, count, AHEAD):
        at, many = room + 8 * k, min(AHEAD, count - k)
        for head in range(args.num_kv_heads):
            row, out = head * rows, products + 4 * (head * rows * CHUNK + k)
            set_products(args, dtypes, queries + row * args.row_bytes, rows, head, at, many, out)
    for head in range(args.num_kv_heads):
        at = args.out + 4 * ((seq * args.num_kv_heads + head) * args.max_blocks + first)
        for k in range(count):
            put_float32(at, k, NONE)
        for row in range(head * rows, head * rows + rows):
            raise_best(products + 4 * row * CHUNK, count, at)
        for k in range(count):
            if get_int32(blocks, k) < 0:
                put_float32(at, k, NONE)


@fast
def set_offsets(args, blocks, left, offsets):
    """The byte offsets of the blocks of a chunk and the next one; they repeat the last one."""
    for k in range(2 * CHUNK):
        put_int64(offsets, k, block_at(args, blocks, min(k, left - 1)) * args.key_block)


@within
def load_queries(args, dtypes, seq, rows, queries):
    """`[num_kv_heads, rows, num_planes, row]`."""
    at, of_plane = queries, args.row_bytes // args.num_planes
    for head in range(args.num_kv_heads):
        for row in range(rows):
            for plane in range(args.num_planes):
                index = (plane * args.num_seqs + seq) * args.group + row
                source = args.query + index * args.query_token + head * args.query_head
                set_query(source, at, args.head_dim, dtypes)
                at += of_plane


@within
def set_products(args, dtypes, queries, rows, head, offsets, count, out):
    """Products `[rows, count]` with some blocks of a head, summed over the planes, CHUNK apart."""
    plane, second = args.key + head * args.key_head, args.value + head * args.key_head
    scale, step, dim, r = args.scale, args.row_bytes, args.head_dim, 0
    if args.num_planes == 1:
        set_logits(args, dtypes, queries, rows, plane, offsets, count, scale, out)
        return
    while r < rows:
        many = 4 if r + 4 <= rows else 2 if r + 2 <= rows else 1
        for k in range(0, count, KEYS):
            at, ahead, to = offsets + 8 * k, offsets + 8 * (k + AHEAD), out + 4 * k
            if many == 4:
                qk_of_two_4(queries, step, plane, second, at, ahead, dim, scale, to, CHUNK, dtypes)
            elif many == 2:
                qk_of_two_2(queries, step, plane, second, at, ahead, dim, scale, to, CHUNK, dtypes)
            else:
                qk_of_two_1(queries, step, plane, second, at, ahead, dim, scale, to, CHUNK, dtypes)
        r, queries, out = r + many, queries + many * step, out + many * 4 * CHUNK


@fast
def raise_best(products, count, best):
    """The greatest of what was found so far and a row's products."""
    for k in range(count):
        put_float32(best, k, max(get_float32(best, k), get_float32(products, k)))

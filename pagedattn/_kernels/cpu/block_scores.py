"""Scores of blocks by their summaries: the greatest product of any query, some blocks at a time.

The struct of a call says what there is: `key` and `value` are the summaries' planes (`num_planes`
of them), `tables` the block of each column, -1 for none, `group` the most queries of a sequence and
KV head, `[num_planes, num_seqs, group, num_kv_heads, head_dim]`, and `seq_lens` how many of these a
sequence has.
"""

from .call_args import APART, args_at, offset
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
from .online_softmax import GROUP, block_at, set_logits
from .qk_matmul import set_query
from .schedule import begin_alike
from .simd import LANES
from .softmax import CHUNK, NONE, ONE

CLAIMED, DONE = map(offset, ("claimed", "done"))


@fast
def begin_scores(call):
    """The address of new arguments with the fields of the given ones; an item is a chunk."""
    given, columns = args_at(call), 2 * LANES
    read = given.num_planes * given.num_seqs * given.max_blocks * given.key_block
    address = begin_alike(call, given.num_seqs * chunks_of(given), read)
    args_at(address).row_bytes = 4 * columns * -(-given.head_dim // columns)
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
    """Byte offsets of two chunks, and queries and products of all heads and planes."""
    rows = args.num_kv_heads * args.num_planes * args.group
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
    queries, planes = room + 16 * CHUNK, args.num_planes
    products = queries + args.num_kv_heads * planes * args.group * args.row_bytes
    set_offsets(args, blocks, args.max_blocks - first, room)
    load_queries(args, dtypes, seq, rows, queries)
    for k in range(0, count, GROUP):
        for plane in range(planes):
            held = args.key if plane == 0 else args.value
            for head in range(args.num_kv_heads):
                row = (head * planes + plane) * rows
                of_rows, out = queries + row * args.row_bytes, products + 4 * (row * CHUNK + k)
                at, many = held + head * args.key_head, min(GROUP, count - k)
                set_logits(args, dtypes, of_rows, rows, at, room + 8 * k, many, ONE, out)
    for head in range(args.num_kv_heads):
        at = args.out + 4 * ((seq * args.num_kv_heads + head) * args.max_blocks + first)
        of_head = products + 4 * head * planes * rows * CHUNK
        for k in range(count):
            put_float32(at, k, NONE)
        for row in range(rows):
            raise_best(args, of_head + 4 * row * CHUNK, rows, count, at)
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
    """`[num_kv_heads, num_planes, rows, row]`."""
    at = queries
    for head in range(args.num_kv_heads):
        for plane in range(args.num_planes):
            for row in range(rows):
                index = (plane * args.num_seqs + seq) * args.group + row
                source = args.query + index * args.query_token + head * args.query_head
                set_query(source, at, args.head_dim, dtypes)
                at += args.row_bytes


@fast
def raise_best(args, products, rows, count, best):
    """The greatest of what was found so far and a row's sums over the planes."""
    others = products + 4 * rows * CHUNK if args.num_planes > 1 else 0
    if others != 0:
        for k in range(count):
            put_float32(products, k, get_float32(products, k) + get_float32(others, k))
    for k in range(count):
        put_float32(best, k, max(get_float32(best, k), get_float32(products, k)))

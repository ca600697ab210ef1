"""A call split into work items of about as many keys each, so that threads have equal work."""

import numpy as np

from .call_args import APART, CALL_ARGS, WORK_ITEM, args_at, work_item_at
from .compiling import fast
from .listed import listed_range
from .memory import aligned_alloc, get_int32, memcpy, memset, put_float32, put_int64
from .prefill import items
from .prefill.items import PRODUCTS_OF_A_THREAD
from .prefill.room import state_bytes
from .simd import LANES
from .softmax import CHUNK, NONE, key_range

ITEMS = 4  # for each thread, if there are keys enough
LEAST_BYTES = 1 << 18  # of keys and values in a work item of a longer sequence
BYTES_OF_A_THREAD = 1 << 18  # with fewer of them for each, fewer threads are faster
CALL_ARGS_BYTES, WORK_ITEM_BYTES = CALL_ARGS.itemsize, WORK_ITEM.itemsize


@fast
def begin(call):
    """The address of new arguments with the fields of the given ones, and of their work items.

    Its users are as many threads as may work on it, and whoever asked for it.
    """
    given = args_at(call)
    columns = 2 * LANES  # a multiple of what any product takes at a time
    row_bytes = 4 * columns * -(-max(given.head_dim, given.value_dim) // columns)
    keys, most_queries, long_tokens, products = measure(given)
    token_bytes = bytes_of_token(given)
    threads = 1 + keys * token_bytes // BYTES_OF_A_THREAD + products // PRODUCTS_OF_A_THREAD
    threads = min(given.threads, threads)
    size, long_state_bytes = item_keys(keys, threads, token_bytes), np.int64(0)
    given.tile_tokens, given.tile_heads, given.by_segments = 0, 1, 0
    if long_tokens > 0:
        given.tile_tokens = items.tile_tokens(given, long_tokens, threads)
        given.tile_heads = max(1, min(given.most_heads, given.num_kv_heads))
        long_state_bytes = state_bytes(given, given.tile_tokens * given.group)
    num_long, num_items, num_cut, num_states = count_items(given, size)
    few = threads * items.ITEMS if threads > 1 else 0
    if given.longest == 0 and num_items < few:
        given.by_segments = 1
        num_long, num_items, num_cut, num_states = count_items(given, size)
    while given.tile_heads > 1 and num_items < few:
        given.tile_heads //= 2
        num_long, num_items, num_cut, num_states = count_items(given, size)
    long_state_bytes *= given.tile_heads
    rows = most_queries * given.num_kv_heads * given.group
    state_size = APART * -(-rows * (row_bytes + 8) // APART)
    items_bytes, partials_bytes = num_items * WORK_ITEM_BYTES, num_cut * APART
    partials_bytes += num_states * max(state_size, long_state_bytes)
    address = aligned_alloc(APART, CALL_ARGS_BYTES + items_bytes + partials_bytes)
    memcpy(address, call, CALL_ARGS_BYTES)
    args = args_at(address)
    args.threads = max(1, min(threads, num_items))
    args.users, args.claimed, args.done, args.num_items = args.threads + 1, 0, 0, num_items
    args.first_item = address + CALL_ARGS_BYTES
    args.partials = args.first_item + items_bytes
    args.state_bytes, args.row_bytes, args.rows = state_size, row_bytes, rows
    set_items(args, size, num_long)
    if num_long > 0:
        items.sort_items(args.first_item, num_long)
    return address


@fast
def begin_alike(call, num_items, num_bytes):
    """As `begin`, of items that are alike and need no description; `num_bytes` are read in all."""
    address = aligned_alloc(APART, CALL_ARGS_BYTES)
    memcpy(address, call, CALL_ARGS_BYTES)
    args = args_at(address)
    args.num_items = num_items
    args.threads = max(1, min(args.threads, 1 + num_bytes // BYTES_OF_A_THREAD, num_items))
    args.users, args.claimed, args.done = args.threads + 1, 0, 0
    return address


@fast
def bytes_of_token(args):
    """What is read of the cache for one key; a latent cache has its values among the keys."""
    columns = args.head_dim if args.value == args.key else args.head_dim + args.value_dim
    return args.num_kv_heads * columns * args.cache_itemsize


@fast
def sequence(args, seq, token):
    """A sequence's first token, number of tokens and length; the one before ends at `token`."""
    token = min(max(token, np.int64(get_int32(args.starts, seq))), args.num_tokens)
    end = min(max(token, np.int64(get_int32(args.starts, seq + 1))), args.num_tokens)
    seq_len = min(
        max(np.int64(get_int32(args.seq_lens, seq)), 0), args.max_blocks * args.block_size
    )
    return token, end - token, seq_len


@fast
def keys_of(args, seq, kv_head, num_queries, seq_len):
    """The range of keys that the queries of a sequence see, or of those listed for a KV head."""
    context = seq_len - num_queries
    return listed_range(args, seq, kv_head, seq_len, context, context + num_queries - 1)


@fast
def heads_together(args):
    """How many KV heads an item of a short sequence has: all whose keys are the same."""
    return np.int64(1) if args.selection != 0 else args.num_kv_heads


@fast
def is_long(args, num_queries):
    return args.prefill != 0 and num_queries > args.longest


@fast
def measure(args):
    """Keys to read and the most queries of short sequences; tokens and products of long ones."""
    token, keys, most = np.int64(0), np.int64(0), np.int64(1)
    tokens, products = np.int64(0), np.int64(0)
    for seq in range(args.num_seqs):
        token, num_queries, seq_len = sequence(args, seq, token)
        token += num_queries
        context = seq_len - num_queries
        first, last = key_range(args, seq_len, context, seq_len - 1)
        seen = last - first
        if args.selection != 0:
            seen = min(seen, args.num_selected * args.block_size)
        if is_long(args, num_queries):
            tokens, products = tokens + num_queries, products + num_queries * seen
        elif num_queries > 0:
            keys, most = keys + seen, max(most, num_queries)
    width = args.num_kv_heads * args.group * (args.head_dim + args.value_dim)
    return keys, most, tokens, products * width


@fast
def item_keys(keys, threads, token_bytes):
    """The most keys of a work item; one thread takes whole sequences."""
    if threads <= 1:
        return max(keys, np.int64(1))
    size = max(keys // (threads * ITEMS), LEAST_BYTES // token_bytes)
    return CHUNK * (1 + size // CHUNK)


@fast
def parts_of(first, last, size):
    return max(1, -(-(last - first) // size))


@fast
def count_items(args, size):
    """Work items of long sequences, and of all; what is cut into several, and the items of that."""
    token, tiles, count = np.int64(0), np.int64(0), np.int64(0)
    cut, states = np.int64(0), np.int64(0)
    for seq in range(args.num_seqs):
        token, num_queries, seq_len = sequence(args, seq, token)
        if is_long(args, num_queries):
            parts, cut_here, states_here = items.count_parts(args, seq, token, num_queries, seq_len)
            tiles, cut, states = tiles + parts, cut + cut_here, states + states_here
        elif num_queries > 0:
            for kv_head in range(0, args.num_kv_heads, heads_together(args)):
                first, last = keys_of(args, seq, kv_head, num_queries, seq_len)
                parts = parts_of(first, last, size)
                count += parts
                if parts > 1:
                    cut, states = cut + 1, states + parts
        token += num_queries
    return tiles, tiles + count, cut, states


@fast
def set_items(args, size, num_long):
    """Writes the work items, those of long sequences first, and the rows that no sequence owns."""
    token, free, tiles = np.int64(0), args.partials, args.first_item
    at = tiles + num_long * WORK_ITEM_BYTES
    for seq in range(args.num_seqs):
        end = token
        token, num_queries, seq_len = sequence(args, seq, end)
        clear_rows(args, end, token)
        if is_long(args, num_queries):
            tiles, free = items.set_items(args, tiles, free, seq, token, num_queries, seq_len)
        elif num_queries > 0:
            for kv_head in range(0, args.num_kv_heads, heads_together(args)):
                at, free = set_parts(
                    args, at, free, size, seq, kv_head, token, num_queries, seq_len
                )
        token += num_queries
    clear_rows(args, token, args.num_tokens)


@fast
def set_parts(args, at, free, size, seq, kv_head, token, num_queries, seq_len):
    """Writes the items of a short sequence; gives the places of the next one and of its states.

    Of one KV head, or of all together.
    """
    first, last = keys_of(args, seq, kv_head, num_queries, seq_len)
    parts = parts_of(first, last, size)
    finished, state = np.int64(0), np.int64(0)
    if parts > 1:
        finished, state = free, free + APART
        put_int64(finished, 0, 0)
        free = state + parts * args.state_bytes
    for part in range(parts):
        item = work_item_at(at)
        item.seq, item.token, item.num_queries, item.seq_len = seq, token, num_queries, seq_len
        item.position = item.context = seq_len - num_queries
        item.kv_head, item.num_heads, item.is_tile = kv_head, heads_together(args), 0
        item.first, item.last = first + part * size, min(last, first + (part + 1) * size)
        item.part, item.parts, item.state, item.finished = part, parts, state, finished
        at += WORK_ITEM_BYTES
        state += args.state_bytes if parts > 1 else 0
    return at, free


@fast
def clear_rows(args, first, last):
    """out 0 and lse -inf."""
    heads = args.num_kv_heads * args.group
    row_bytes = heads * args.value_dim * args.itemsize
    memset(args.out + first * row_bytes, 0, (last - first) * row_bytes)
    if args.lse != 0:
        for i in range(first * heads, last * heads):
            put_float32(args.lse, i, NONE)

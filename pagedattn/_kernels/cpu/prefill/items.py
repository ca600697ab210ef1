"""Long sequences cut into tiles of queries, one KV head each, the most expensive first.

Threads claim them in order, so that what is left for the end is small.
"""

import numpy as np

from ..call_args import WORK_ITEM, work_item_at
from ..compiling import fast
from ..memory import aligned_alloc, free, get_int64, memcpy, memset, put_int64
from ..softmax import key_range
from .room import KEYS

ITEM_BYTES = WORK_ITEM.itemsize
ITEMS = 4  # for each thread, if there are tokens enough
LEAST_ROWS = 96  # of an item: its keys are packed for all of them
ROWS_BYTES = 1 << 19  # of an item's queries and sums, at most: they stay in the second level
LEVELS = 64  # of costs that are told apart
PRODUCTS_OF_A_THREAD = 1 << 21  # with fewer for each, fewer threads are faster


@fast
def tile_tokens(args, tokens, threads):
    """How many tokens an item has, where long sequences have so many together."""
    most = ROWS_BYTES // (4 * (args.head_dim + args.value_dim)) // args.group
    least = LEAST_ROWS // args.group
    fair = tokens * args.num_kv_heads // (threads * ITEMS)
    return max(np.int64(1), min(max(fair, least), most))


@fast
def set_item(args, at, seq, token, num_queries, seq_len, first, kv_head):
    """Writes the item of the queries of a sequence from `first` on."""
    item = work_item_at(at)
    count = min(args.tile_tokens, num_queries - first)
    item.seq, item.token, item.num_queries, item.seq_len = seq, token + first, count, seq_len
    item.position, item.kv_head = seq_len - num_queries + first, kv_head
    low, high = key_range(args, seq_len, item.position, item.position + count - 1)
    item.first, item.last, item.part, item.parts = low, high, 0, 1
    item.state, item.finished = 0, 0


@fast
def set_items(args, at, seq, token, num_queries, seq_len):
    """Writes the items of a sequence, and gives the place of the next one."""
    for first in range(0, num_queries, args.tile_tokens):
        for kv_head in range(args.num_kv_heads):
            set_item(args, at, seq, token, num_queries, seq_len, first, kv_head)
            at += ITEM_BYTES
    return at


@fast
def cost(at):
    """In tiles of keys times tokens."""
    item = work_item_at(at)
    return (1 + (item.last - item.first) // KEYS) * item.num_queries


@fast
def sort_items(first, count):
    """Orders items by their costs, as far as LEVELS tell them apart: a counting sort."""
    size, highest = count * ITEM_BYTES, np.int64(1)
    for i in range(count):
        highest = max(highest, cost(first + i * ITEM_BYTES))
    given = aligned_alloc(128, size + 8 * LEVELS)
    memcpy(given, first, size)
    begins = given + size
    memset(begins, 0, 8 * LEVELS)
    for i in range(count):
        level = level_of(given + i * ITEM_BYTES, highest)
        for later in range(level + 1, LEVELS):
            put_int64(begins, later, get_int64(begins, later) + 1)
    for i in range(count):
        at = given + i * ITEM_BYTES
        level = level_of(at, highest)
        place = get_int64(begins, level)
        put_int64(begins, level, place + 1)
        memcpy(first + place * ITEM_BYTES, at, ITEM_BYTES)
    free(given)


@fast
def level_of(at, highest):
    """0 for the most expensive."""
    return (highest - cost(at)) * (LEVELS - 1) // highest

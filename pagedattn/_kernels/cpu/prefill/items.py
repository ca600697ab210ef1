"""Long sequences cut into tiles of queries of a KV head, the most expensive first.

Threads claim them in order, so that what is left for the end is small. Where results are
batch-invariant and tiles are few, each segment of a tile's keys is an item. There tiles of few rows
have several KV heads: what lies side by side in memory is read together.
"""

import numpy as np

from ..call_args import APART, work_item_at
from ..compiling import fast
from ..listed import listed_range
from ..memory import aligned_alloc, free, get_int64, memcpy, memset, put_int64
from ..simd import LANES
from ..softmax import lowest_position
from .room import ITEM_BYTES, KEYS, SEGMENT, state_bytes

ITEMS = 4  # for each thread, if there are tokens enough, or segments of keys
LEAST_ROWS = 96  # of an item: its keys are packed for all of them
# Of an item's queries and sums, at most. For faster products they stay in the second level; AVX2's
# leave time to read them from the third, and keys are packed for twice as many.
ROWS_BYTES = 1 << (20 if LANES == 8 else 19)
LEVELS = 64  # of costs that are told apart
ROWS_TOGETHER = 64  # of all KV heads of an item that has several
PRODUCTS_OF_A_THREAD = 1 << 21  # with fewer for each, fewer threads are faster


@fast
def tile_tokens(args, tokens, threads):
    """How many tokens an item has, where long sequences have so many together."""
    most = ROWS_BYTES // (4 * (args.head_dim + args.value_dim)) // args.group
    least = LEAST_ROWS // args.group
    fair = tokens * args.num_kv_heads // (threads * ITEMS)
    return max(np.int64(1), min(max(fair, least), most))


@fast
def keys_of_tile(args, seq, kv_head, token, num_queries, seq_len, first):
    """How many tokens the tile from a sequence's token `first` on has, and the keys it sees."""
    count, context = min(args.tile_tokens, num_queries - first), seq_len - num_queries
    position = context + first
    lowest = lowest_position(args, context, token + first, position, count)
    low, high = listed_range(args, seq, kv_head, seq_len, lowest, position + count - 1)
    return count, low, high


@fast
def heads_of_tile(args, num_queries, first):
    """How many KV heads an item of the tile from a sequence's token `first` on has."""
    if args.selection != 0:
        return np.int64(1)
    rows = min(args.tile_tokens, num_queries - first) * args.group
    return max(np.int64(1), min(args.tile_heads, ROWS_TOGETHER // rows))


@fast
def parts_of(args, low, high):
    """The items of a tile's keys."""
    if args.by_segments == 0 or low == high:
        return np.int64(1)
    return (high - 1) // SEGMENT - low // SEGMENT + 1


@fast
def count_parts(args, seq, token, num_queries, seq_len):
    """The items of a sequence; its tiles of several, and the items of these."""
    count, cut, states = np.int64(0), np.int64(0), np.int64(0)
    for first in range(0, num_queries, args.tile_tokens):
        for kv_head in range(0, args.num_kv_heads, heads_of_tile(args, num_queries, first)):
            _, low, high = keys_of_tile(args, seq, kv_head, token, num_queries, seq_len, first)
            parts = parts_of(args, low, high)
            count += parts
            if parts > 1:
                cut, states = cut + 1, states + parts
    return count, cut, states


@fast
def set_items(args, at, free, seq, token, num_queries, seq_len):
    """Writes the items of a sequence; gives the places of the next one, and of its states."""
    for first in range(0, num_queries, args.tile_tokens):
        for kv_head in range(0, args.num_kv_heads, heads_of_tile(args, num_queries, first)):
            at, free = set_tile(args, at, free, seq, token, num_queries, seq_len, first, kv_head)
    return at, free


@fast
def set_tile(args, at, free, seq, token, num_queries, seq_len, first, kv_head):
    """Writes the items of the tile from a sequence's token `first` on."""
    count, low, high = keys_of_tile(args, seq, kv_head, token, num_queries, seq_len, first)
    parts, finished, state = parts_of(args, low, high), np.int64(0), np.int64(0)
    heads = min(heads_of_tile(args, num_queries, first), args.num_kv_heads - kv_head)
    size = heads * state_bytes(args, args.tile_tokens * args.group)
    if parts > 1:
        finished, state = free, free + APART
        put_int64(finished, 0, 0)
        free = state + parts * size
    begin = low // SEGMENT * SEGMENT
    for part in range(parts):
        item = work_item_at(at)
        item.seq, item.token, item.num_queries, item.seq_len = seq, token + first, count, seq_len
        item.context, item.kv_head = seq_len - num_queries, kv_head
        item.num_heads, item.is_tile = heads, 1
        item.position = item.context + first
        item.first, item.last, item.part, item.parts = low, high, part, parts
        item.state, item.finished = state, finished
        if parts > 1:
            item.first = max(low, begin + part * SEGMENT)
            item.last = min(high, begin + (part + 1) * SEGMENT)
            state += size
        at += ITEM_BYTES
    return at, free


@fast
def cost(at):
    """In tiles of keys times tokens and KV heads."""
    item = work_item_at(at)
    return (1 + (item.last - item.first) // KEYS) * item.num_queries * item.num_heads


@fast
def sort_items(first, count):
    """Orders items by their costs, as far as LEVELS tell them apart: a counting sort."""
    size, highest = count * ITEM_BYTES, np.int64(1)
    for i in range(count):
        highest = max(highest, cost(first + i * ITEM_BYTES))
    given = aligned_alloc(APART, size + 8 * LEVELS)
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

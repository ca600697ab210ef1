"""The keys of an item, counted in the list of blocks that its KV head attends to.

Blocks are listed in ascending order, so the keys that a query sees follow one another in the list,
as they do in a sequence. Without a selection a key's number is its position.
"""

import numpy as np

from .compiling import fast
from .memory import get_int32
from .softmax import key_range, lowest_position


@fast
def list_of(args, seq, kv_head):
    """The address of a list of blocks."""
    return args.selection + 4 * args.num_selected * (seq * args.num_kv_heads + kv_head)


@fast
def rank(args, seq, kv_head, position):
    """How many of the listed keys stand before a position."""
    blocks, column = list_of(args, seq, kv_head), position // args.block_size
    low, high = np.int64(0), args.num_selected
    while low < high:
        middle = (low + high) // 2
        block = get_int32(blocks, middle)
        if block < 0 or block >= column:
            high = middle
        else:
            low = middle + 1
    begun = low < args.num_selected and get_int32(blocks, low) == column
    return low * args.block_size + (position - column * args.block_size if begun else 0)


@fast
def listed_range(args, seq, kv_head, seq_len, lowest, highest):
    """The listed keys that any query from position `lowest` to `highest` may see."""
    first, last = key_range(args, seq_len, lowest, highest)
    if args.selection == 0:
        return first, last
    return rank(args, seq, kv_head, first), rank(args, seq, kv_head, last)


@fast
def seen_range(args, item, lowest, highest):
    """The listed keys that queries of the item from position `lowest` to `highest` may see."""
    return listed_range(args, item.seq, item.kv_head, item.seq_len, lowest, highest)


@fast
def seen_by(args, item, i, count):
    """The listed keys that any of `count` queries of the item may see, from query `i` on."""
    token, position = item.token + i, item.position + i
    lowest = lowest_position(args, item.context, token, position, count)
    return seen_range(args, item, lowest, position + count - 1)


@fast
def column_of(args, item, index):
    """The block of the sequence that is at an index of the item's list."""
    if args.selection == 0:
        return index
    blocks = list_of(args, item.seq, item.kv_head)
    column = np.int64(get_int32(blocks, min(index, args.num_selected - 1)))
    return min(max(column, 0), args.max_blocks - 1)  # promised to ascend, not checked


@fast
def run_of(args, item, first, count):
    """The position of a listed key, and how many of `count` keys follow it in the sequence."""
    if args.selection == 0:
        return first, count
    index = first // args.block_size
    slot = first - index * args.block_size
    position = column_of(args, item, index) * args.block_size + slot
    return position, min(count, args.block_size - slot)

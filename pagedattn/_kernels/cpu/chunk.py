"""Where the keys and values of a chunk lie in the pages."""

import numpy as np

from .compiling import fast
from .listed import column_of
from .memory import get_float32, get_int32, get_int64, put_float32, put_int64
from .softmax import CHUNK, NONE, ZERO


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
def set_shown_values(offsets, away, shown, out):
    """Writes offsets of values: a key's own, or `away`, to zeros, if no row sees it.

    What a slot holds that a bias hides from all may be NaN, which a weight of 0 would not undo.
    """
    for k in range(CHUNK):
        hidden = get_float32(shown, k) == NONE
        put_int64(out, k, away if hidden else get_int64(offsets, k))


@fast
def clear_hidden(factors, shown):
    """Scales of values that a bias hides from all may be NaN: 0 for them."""
    for k in range(CHUNK):
        hidden = get_float32(shown, k) == NONE
        put_float32(factors, k, ZERO if hidden else get_float32(factors, k))

"""The keys of a tile, counted in the list of blocks that its KV head attends to.

Blocks are listed in ascending order, then -1. So the keys that a row sees follow one another in the
list, as they do in a sequence, and how many they are is looked up once a tile. Where all blocks are
listed, every number here is what it is without a list.
"""

# Constants are NamedTuples here, which the type `constexpr` does not say.
# pyright: reportAttributeAccessIssue=false

import triton
import triton.language as tl

from ..._arrays.namespace import arange

NOWHERE = tl.constexpr(1 << 30)  # behind every key that is attended to


def listed_blocks(tables, selection):
    """i32 `[num_seqs, num_kv_heads, num_listed]`: where in the cache the listed blocks are.

    For arrays of JAX and torch.
    """
    seqs = arange(len(tables), tables)[:, None, None]
    return tables[seqs, selection.clip(0, tables.shape[1] - 1)]


@triton.jit
def positions_of(cache, step, keys, config: tl.constexpr):
    """What masks compare of a step's keys, the first of which is `step`.

    Their positions or, of a selection without windows and ALiBi, their places in its list.
    """
    BLOCK_SIZE: tl.constexpr = config.layout.block_size
    positions = keys
    if config.options.looked_up:
        if BLOCK_SIZE % config.keys == 0:
            column = tl.load(cache.selection + step // BLOCK_SIZE)  # the step lies in one block
        else:
            index = keys // BLOCK_SIZE
            column = tl.load(cache.selection + index, mask=index < cache.num_listed, other=-1)
        positions = tl.where(column >= 0, column * BLOCK_SIZE + keys % BLOCK_SIZE, NOWHERE)
    return positions


@triton.jit
def rank(cache, position, most, BLOCK_SIZE: tl.constexpr):
    """How many listed keys stand before a position, or before each of some.

    `most` is how many blocks they may lie in: the search ends after as many steps as it has bits.
    """
    position = tl.maximum(position, 0)
    column = position // BLOCK_SIZE
    low = column * 0
    left = most
    while left > 0:
        middle = low + (left - 1) // 2
        block = tl.load(cache.selection + middle)
        low = tl.where((block >= 0) & (block < column), middle + 1, low)
        left = left // 2
    block = tl.load(cache.selection + low, mask=low < most, other=-1)
    return low * BLOCK_SIZE + tl.where(block == column, position % BLOCK_SIZE, 0)


@triton.jit
def most_listed(cache, end, BLOCK_SIZE: tl.constexpr):
    """The most listed blocks that begin before a position."""
    return tl.minimum(cache.num_listed, tl.cdiv(tl.maximum(end, 0), BLOCK_SIZE))


@triton.jit
def last_seen(cache, span, task, positions, config: tl.constexpr):
    """The place in the list of the last key that each row at a position may see."""
    BLOCK_SIZE: tl.constexpr = config.layout.block_size
    last = tl.zeros_like(positions) + (span.end - 1)
    if task.query_len - task.first > 1:
        most = most_listed(cache, task.seq_len, BLOCK_SIZE)
        last = rank(cache, positions + 1, most, BLOCK_SIZE) - 1
    return last

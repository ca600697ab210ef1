"""The keys of a tile, counted in the list of blocks that its KV head attends to.

Blocks are listed in ascending order, then -1. So the keys that a row sees follow one another in the
list, as they do in a sequence: only their positions must be looked up. Where all blocks are listed,
every number here is what it is without a list.
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
    """The positions of a step's keys, the first of which is `step`; NOWHERE of no block's."""
    BLOCK_SIZE: tl.constexpr = config.layout.block_size
    positions = keys
    if config.options.selection:
        if BLOCK_SIZE % config.keys == 0:
            column = tl.load(cache.selection + step // BLOCK_SIZE)  # the step lies in one block
        else:
            index = keys // BLOCK_SIZE
            column = tl.load(cache.selection + index, mask=index < cache.num_listed, other=-1)
        positions = tl.where(column >= 0, column * BLOCK_SIZE + keys % BLOCK_SIZE, NOWHERE)
    return positions


@triton.jit
def rank(cache, position, most, BLOCK_SIZE: tl.constexpr):
    """How many of the keys of the first `most` listed blocks stand before a position."""
    column = position // BLOCK_SIZE
    low = 0
    high = most
    while low < high:
        middle = (low + high) // 2
        block = tl.load(cache.selection + middle)
        if (block >= 0) & (block < column):
            low = middle + 1
        else:
            high = middle
    block = tl.load(cache.selection + low, mask=low < most, other=-1)
    return low * BLOCK_SIZE + tl.where(block == column, position % BLOCK_SIZE, 0)


@triton.jit
def most_listed(cache, end, BLOCK_SIZE: tl.constexpr):
    """The most listed blocks that begin before a position."""
    return tl.minimum(cache.num_listed, tl.cdiv(tl.maximum(end, 0), BLOCK_SIZE))


@triton.jit
def last_listed(cache, end, BLOCK_SIZE: tl.constexpr):
    """The key after the last one that may stand before a position."""
    most = most_listed(cache, end, BLOCK_SIZE)
    column = tl.load(cache.selection + most - 1, mask=most > 0, other=-1)
    missing = tl.cdiv(end, BLOCK_SIZE) * BLOCK_SIZE - end
    last_one = (most > 0) & (column == tl.cdiv(end, BLOCK_SIZE) - 1)
    return most * BLOCK_SIZE - tl.where(last_one, missing, 0)

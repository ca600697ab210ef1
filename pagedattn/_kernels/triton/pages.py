"""The keys and values of one step, as they are read from the cache's blocks."""

# Constants are NamedTuples here, which the type `constexpr` does not say.
# pyright: reportAttributeAccessIssue=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .eight_bits import in_pairs, octets, widened
from .four_bits import halves
from .scales import load_groups, row_of


class Cache(NamedTuple):
    """The keys and values of a sequence, for one KV head. Strides are in units."""

    key: Any
    value: Any
    key_scale: Any  # of all heads
    value_scale: Any
    key_scale_stride: Any  # of per-head scales
    value_scale_stride: Any
    kv_head: Any
    num_kv_heads: Any
    table: Any  # the sequence's row of the block tables
    num_blocks: Any
    block_stride: Any
    slot_stride: Any
    value_block_stride: Any
    value_slot_stride: Any
    selection: Any  # the blocks of the sequence that are in the table's row, if it is a list
    num_listed: Any


class Slots(NamedTuple):
    """The keys of a step in the cache."""

    blocks: Any
    slots: Any
    keys: Any  # offsets from the first key
    inside: Any  # whether a key is one of those to read


@triton.jit
def find_slots(cache, step, keys, inside, config: tl.constexpr, MASKED: tl.constexpr):
    """The slots of a step's keys, the first of which is `step`."""
    layout: tl.constexpr = config.layout
    few_bits: tl.constexpr = layout.halves or layout.nibbles
    whole: tl.constexpr = config.keys > layout.block_size and config.keys % layout.block_size == 0
    if few_bits and whole and not MASKED:
        blocks = load_each_block(cache, step, layout.block_size, config.keys)
        slots = tl.arange(0, config.keys) % layout.block_size
    else:
        blocks = load_blocks(cache, step, keys, inside, layout.block_size, config.keys, MASKED)
        slots = keys % layout.block_size
    if not layout.small:
        blocks, slots = blocks.to(tl.int64), slots.to(tl.int64)
    unit: tl.constexpr = layout.stride_unit
    offsets = blocks * (cache.block_stride * unit) + slots * (cache.slot_stride * unit)
    return Slots(blocks=blocks, slots=slots, keys=offsets, inside=inside)


@triton.jit
def load_blocks(
    cache, step, keys, inside, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr
):
    """The block of each key of a step; ids are clamped to the cache."""
    if BLOCK_SIZE % KEYS == 0:
        blocks = tl.load(cache.table + step // BLOCK_SIZE)  # the step lies in one block
    elif MASKED:
        blocks = tl.load(cache.table + keys // BLOCK_SIZE, mask=inside, other=0)
    else:
        blocks = tl.load(cache.table + keys // BLOCK_SIZE)
    return tl.minimum(tl.maximum(blocks, 0), cache.num_blocks - 1)


@triton.jit
def load_each_block(cache, step, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """As `load_blocks`, of several whole blocks: fewer instructions, in 16 bits more registers."""
    COUNT: tl.constexpr = KEYS // BLOCK_SIZE
    blocks = tl.load(cache.table + step // BLOCK_SIZE + tl.arange(0, COUNT))
    blocks = tl.minimum(tl.maximum(blocks, 0), cache.num_blocks - 1)
    return tl.reshape(tl.broadcast_to(blocks[:, None], [COUNT, BLOCK_SIZE]), [KEYS])


@triton.jit
def load_keys(cache, slots, dtype: tl.constexpr, config: tl.constexpr, MASKED: tl.constexpr):
    """`[keys, widths.dims]`: the first tile of the keys; of four bits two tiles, half as wide."""
    layout: tl.constexpr = config.layout
    columns: tl.constexpr = config.widths.head_dim
    WIDTH: tl.constexpr = config.widths.dims
    if layout.nibbles:
        HALF: tl.constexpr = columns // 2
        k = load_slots(cache.key, slots.keys, slots.inside, 0, WIDTH // 2, HALF, MASKED)
        low, high = load_halves(
            cache.key_scale, cache, slots, WIDTH // 2, 1, columns, layout.key_groups, config, MASKED
        )
        k = halves(k, low, high, dtype)
    elif layout.halves:
        k = load_slots(octets(cache.key), slots.keys, slots.inside, 0, WIDTH, columns, MASKED)
        k = widened(k, cache.key.dtype.element_ty)
    else:
        k = load_slots(cache.key, slots.keys, slots.inside, 0, WIDTH, columns, MASKED).to(dtype)
    return k


@triton.jit
def load_values(cache, slots, k, config: tl.constexpr, MASKED: tl.constexpr):
    """`[keys, widths.value_dims]` in the dtype of the keys `k`, or as many in pairs of bytes."""
    layout: tl.constexpr = config.layout
    columns: tl.constexpr = config.widths.value_dim
    WIDTH: tl.constexpr = config.widths.value_dims
    if config.widths.latent:
        v = k
    elif layout.pairs:
        offsets = value_offsets(cache, slots, config) // 2
        plane = in_pairs(cache.value)
        HELD: tl.constexpr = layout.sums  # columns of a pair
        v = load_slots(plane, offsets, slots.inside, 0, WIDTH // HELD, columns // HELD, MASKED)
        if layout.nibbles:
            low, high = load_halves(
                cache.value_scale, cache, slots, WIDTH // HELD, 2, columns, layout.value_groups,
                config, MASKED,
            )  # fmt: skip
            v = v, low, high
    else:
        offsets = value_offsets(cache, slots, config)
        v = load_slots(cache.value, offsets, slots.inside, 0, WIDTH, columns, MASKED).to(k.dtype)
    return v


@triton.jit
def load_halves(
    scales, cache, slots, WIDTH: tl.constexpr, HELD: tl.constexpr, COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr, config: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`[keys, WIDTH]` twice: the scales of the columns of the first half and of the second."""
    rows, inside = row_of(cache, slots, config), slots.inside
    GROUP: tl.constexpr = COLUMNS // GROUPS
    low = load_groups(scales, rows, inside, 0, WIDTH, HELD, GROUP, GROUPS, MASKED)
    high = load_groups(scales, rows, inside, COLUMNS // 2, WIDTH, HELD, GROUP, GROUPS, MASKED)
    return low, high


@triton.jit
def value_offsets(cache, slots, config: tl.constexpr):
    """Offsets of values from the first one."""
    unit: tl.constexpr = config.layout.stride_unit
    offsets = slots.keys
    if not config.layout.alike:
        offsets = slots.blocks * (cache.value_block_stride * unit)
        offsets += slots.slots * (cache.value_slot_stride * unit)
    return offsets


@triton.jit
def load_slots(
    plane, offsets, inside, FIRST: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """`[keys, WIDTH]` of a plane's COLUMNS, from FIRST on; 0 where nothing is to be read."""
    dims = FIRST + tl.arange(0, WIDTH)
    pointers = plane + offsets[:, None] + dims[None, :]
    if MASKED and FIRST + WIDTH > COLUMNS:
        return tl.load(pointers, mask=inside[:, None] & (dims < COLUMNS)[None, :], other=0.0)
    if MASKED:
        return tl.load(pointers, mask=inside[:, None], other=0.0)
    if FIRST + WIDTH > COLUMNS:
        return tl.load(pointers, mask=(dims < COLUMNS)[None, :], other=0.0)
    return tl.load(pointers)

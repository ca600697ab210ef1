"""Keys or values with per-token scales as rows of another dtype: of the blocks in use, for a call.

What is written are blocks of their own, one for each entry of the block tables. Entries behind a
sequence's last block take a program that ends at once, and their blocks hold anything.
"""

# Constants are NamedTuples here, which the type `constexpr` does not say.
# pyright: reportAttributeAccessIssue=false

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..._arrays.namespace import cdiv
from ..._dispatch.call import Call
from ...cache.packing import group_of
from .launch import Launch
from .scales import load_groups
from .widths import in_four_bits, power_of_two

ELEMENTS = 4096  # of a program's tile


class Held(NamedTuple):
    """What the kernel reads."""

    plane: Any  # [num_blocks, block_size, num_kv_heads, bytes], of any strides but the last
    scales: Any  # [num_blocks, block_size, num_kv_heads], in four bits [..., groups]
    block_tables: Any  # i32 [num_seqs, max_blocks]
    seq_lens: Any  # i32 [num_seqs]


class Rows(NamedTuple):
    """What a program is compiled for."""

    block_size: int
    heads: int
    held: int  # elements of a row of the plane
    groups: int  # with a scale each, in four bits; 0 in eight
    unit: int  # of the strides
    width: int  # `held` padded to a power of two
    count: int  # rows of a tile


def dequantise_launch(call: Call, name: str, table_stride: int) -> Launch:
    """The launch of `dequantise_kernel` for the "key" or the "value" of a call's cache."""
    columns = call.head_dim if name == "key" else call.out_dim
    strides, four = getattr(call.strides, name)[:3], in_four_bits(call)
    held, unit = columns // 2 if four else columns, math.gcd(16, *strides)
    width = power_of_two(held)
    rows = Rows(
        block_size=call.block_size,
        heads=call.num_kv_heads,
        held=held,
        groups=columns // group_of(columns) if four else 0,
        unit=unit,
        width=width,
        count=max(1, ELEMENTS // width),
    )
    scalars = {
        "num_blocks": call.num_blocks,
        "max_blocks": call.max_blocks,
        "table_stride": table_stride,
        **dict(zip(STRIDES, (stride // unit for stride in strides), strict=True)),
    }
    tiles = cdiv(call.block_size * call.num_kv_heads, rows.count)
    grid = call.num_seqs * call.max_blocks, tiles, 1
    return Launch(grid, scalars, {"config": rows}, num_warps=4, num_stages=1)


STRIDES = "block_stride", "slot_stride", "head_stride"


@triton.jit(do_not_specialize=["num_blocks", "max_blocks", "table_stride", *STRIDES])
def dequantise_kernel(
    arrays,  # `Held`
    num_blocks,
    max_blocks,
    table_stride,
    block_stride,  # in units
    slot_stride,
    head_stride,
    results,  # [num_seqs * max_blocks, block_size, num_kv_heads, columns]
    config: tl.constexpr,
):
    """Rows times their scales, as `dequantised` in cache/quantise.py."""
    entry, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seq, column = entry // max_blocks, entry % max_blocks
    HEADS: tl.constexpr = config.heads
    ALL: tl.constexpr = config.block_size * HEADS
    first = column * config.block_size + tile * config.count // HEADS
    if first < tl.load(arrays.seq_lens + seq):
        block = tl.load(arrays.block_tables + seq * table_stride + column)
        block = tl.minimum(tl.maximum(block, 0), num_blocks - 1).to(tl.int64)
        rows = tile * config.count + tl.arange(0, config.count)
        strides = (rows // HEADS) * slot_stride + (rows % HEADS) * head_stride
        offsets = (block * block_stride + strides) * config.unit
        dims = tl.arange(0, config.width)
        exists, scaled, target = rows < ALL, block * ALL + rows, entry * ALL + rows
        inside = exists[:, None] & (dims < config.held)[None, :]
        held = tl.load(arrays.plane + offsets[:, None] + dims[None, :], mask=inside, other=0.0)
        if config.groups > 0:
            scales = arrays.scales
            store_half(held, 0, scales, scaled, exists, results, target, inside, config)
            store_half(held >> 4, 1, scales, scaled, exists, results, target, inside, config)
        else:
            scale = tl.load(arrays.scales + scaled, mask=exists, other=0.0)
            values = (held.to(tl.float32) * scale[:, None]).to(results.dtype.element_ty)
            at = target[:, None] * config.held + dims[None, :]
            tl.store(results + at, values, mask=inside)


@triton.jit
def store_half(
    bits, HALF: tl.constexpr, scales, scaled, exists, results, target, inside, config: tl.constexpr
):
    """The columns of half a row, in the lowest four bits, times the scales of their groups."""
    FIRST: tl.constexpr = HALF * config.held
    GROUP: tl.constexpr = 2 * config.held // config.groups
    scale = load_groups(
        scales, scaled, exists, FIRST, config.width, 1, GROUP, config.groups, MASKED=True
    )
    numbers = (((bits & 15) ^ 8).to(tl.float32) - 8.0) * scale.to(tl.float32)
    at = target[:, None] * (2 * config.held) + FIRST + tl.arange(0, config.width)[None, :]
    tl.store(results + at, numbers.to(results.dtype.element_ty), mask=inside)

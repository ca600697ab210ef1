"""Decodes over keys and values of four bits, of two KV heads in a program where that fits.

A row in the cache has 64 bytes, and those of two heads lie side by side: read by programs of their
own they take half as long again. A warp has registers for both heads only if no products are of
rows that hold nothing, as most of 16 rows of queries would. So queries are the columns of products,
and their rows are keys, or columns of values.

Four bits become a number by one instruction for two, without their scale and with an offset that is
the same for all. Products of keys are multiplied by the scale of their group of columns, weights by
that of the values' group, and what offsets add is a sum of queries or of weights. A half of a row
has two such groups. Each has a column of its own for every query, `[query, group of the half]`,
where those of the other group hold zeros or what is not read: 8 columns for up to 4 queries of a KV
head, of which two fit into a program, or 16 for up to 8. One thread has both columns of a query.
"""

# Constants are NamedTuples here, which the type `constexpr` does not say.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .eight_bits import INTERPRETED, in_pairs, power_below
from .four_bits import (
    HIGH_IN_FLOAT16,
    LOW_IN_FLOAT16,
    OFFSET_IN_BFLOAT16,
    offset_bfloat16,
    offset_float16,
)
from .online_softmax import Span, tanh
from .pages import find_slots, value_offsets
from .scales import row_of
from .states import finished

LOG2E = tl.constexpr(1.4426950408889634)
PAIRS = tl.constexpr(32)  # of bytes, in a row of 128 columns
HALF = tl.constexpr(64)  # columns
SCALE_GROUP = tl.constexpr(32)  # columns that share a scale
EIGHT = tl.constexpr(8)  # rows and columns of what lies in the threads of a warp
# How results lie in the threads of a warp, which tests/targets looks at in all versions tested.
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
LAYOUT_IS_KNOWN = tl.constexpr(VERSION < (3, 10))


class Queries(NamedTuple):
    """Tiles `[KV heads, PAIRS, columns]` of even and odd columns of both halves, as float16."""

    tiles: Any  # in the order of `offset_float16`
    low: Any  # [KV heads, 1, columns]: what is added for the offsets of the first half
    high: Any  # and for those of the second one
    scale: Any  # on products; [KV heads, queries]


class State(NamedTuple):
    """The online softmax of the keys so far."""

    highest: Any  # logit, [KV heads, queries]
    total: Any  # of the weights of every EIGHT-th key: `[KV heads, EIGHT, queries]`
    sums: Any  # tiles `[KV heads, PAIRS, columns]` in the order of `offset_float16`


@triton.jit
def attend_int4(rows, cache, task, span, middle, formula, config: tl.constexpr, tile: tl.constexpr):
    """Computes one token of `config.kv_heads` KV heads; no mask is needed before `middle`."""
    queries = load_queries(rows, formula, config, tile)
    HEADS: tl.constexpr = config.kv_heads
    COLUMNS: tl.constexpr = tile.rows
    QUERIES: tl.constexpr = tile.rows // 2
    nothing = tl.zeros([HEADS, PAIRS, COLUMNS], tl.float32)
    state = State(
        highest=tl.full([HEADS, QUERIES], float("-inf"), tl.float32),
        total=tl.zeros([HEADS, EIGHT, QUERIES], tl.float32),
        sums=(nothing, nothing, nothing, nothing),
    )
    if tile.unmasked:
        unmasked = Span(begin=span.begin, end=span.end, start=span.start, stop=middle)
        state = attend_keys(state, unmasked, queries, cache, formula, config, tile, False)
        span = Span(begin=span.begin, end=span.end, start=middle, stop=span.stop)
    state = attend_keys(state, span, queries, cache, formula, config, tile, True)
    store_state(rows, task, state, config, tile)


@triton.jit
def load_queries(rows, formula, config: tl.constexpr, tile: tl.constexpr):
    unit: tl.constexpr = config.layout.stride_unit
    heads, exists = heads_of(config, tile)
    dims = tl.arange(0, 2 * HALF)
    at = heads.to(tl.int64)[:, :, None] * (rows.query_head_stride * unit) + dims[None, None, :]
    q = tl.load(rows.query + at, mask=exists[:, :, None], other=0.0).to(tl.float32)
    factors = power_below(tl.max(tl.where(q == q, tl.abs(q), 0.0), 2))  # NaN has no size
    q = (q * (1.0 / factors)[:, :, None]).to(tl.float16)
    tiles = tiles_of(-q if config.options.negate else q, config, tile)
    return Queries(
        tiles=tiles,
        low=column_sums(tiles[0], tiles[2]) * -LOW_IN_FLOAT16,
        high=column_sums(tiles[1], tiles[3]) * -HIGH_IN_FLOAT16,
        scale=formula.scale * factors,
    )


@triton.jit
def tiles_of(q, config: tl.constexpr, tile: tl.constexpr):
    q = tl.reshape(q, [config.kv_heads, tile.rows // 2, 2, PAIRS, 2])
    even, odd = tl.split(tl.permute(q, (0, 3, 1, 2, 4)))
    low_even, high_even = tl.split(even)
    low_odd, high_odd = tl.split(odd)
    return (
        of_own_group(low_even, tile), of_own_group(high_even, tile),
        of_own_group(low_odd, tile), of_own_group(high_odd, tile),
    )  # fmt: skip


@triton.jit
def column_sums(even, odd):
    """`[KV heads, 1, columns]`: by a product, as additions would go across threads."""
    ones = tl.full([even.shape[0], 16, PAIRS], 1.0, tl.float16)
    return tl.max(tl.dot(ones, odd, tl.dot(ones, even)), 1)[:, None, :]


@triton.jit
def heads_of(config: tl.constexpr, tile: tl.constexpr):
    """`[KV heads, queries]`: the query heads of a program, and whether they exist."""
    QUERIES: tl.constexpr = config.group // config.kv_heads
    place, kv_heads = tl.arange(0, tile.rows // 2), tl.arange(0, config.kv_heads)
    heads = kv_heads[:, None] * QUERIES + place[None, :]
    return heads, (place < QUERIES)[None, :] & (kv_heads >= 0)[:, None]


@triton.jit
def of_own_group(q, tile: tl.constexpr):
    """`[KV heads, PAIRS, columns]`, with zeros where a pair is not of its column's group."""
    return tl.where(own_pairs(tile)[None], in_both_columns(q), 0.0)


@triton.jit
def in_both_columns(numbers):
    """Numbers of queries, `[..., queries]`, in the columns of both of their groups."""
    HEADS: tl.constexpr = numbers.shape[0]
    COUNT: tl.constexpr = numbers.shape[1]
    QUERIES: tl.constexpr = numbers.shape[2]
    both = tl.broadcast_to(numbers[:, :, :, None], [HEADS, COUNT, QUERIES, 2])
    return tl.reshape(both, [HEADS, COUNT, 2 * QUERIES])


@triton.jit
def own_pairs(tile: tl.constexpr):
    """`[PAIRS, columns]`: whether a pair of bytes is of a column's group."""
    group = tl.arange(0, PAIRS) // (SCALE_GROUP // 2)
    return group[:, None] == group_of_column(tile)[None, :]


@triton.jit
def group_of_column(tile: tl.constexpr):
    return tl.arange(0, tile.rows) % 2


@triton.jit
def attend_keys(
    state, span, queries, cache, formula, config: tl.constexpr, tile: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The state after the keys of a span."""
    highest, total, sums = state.highest, state.total, state.sums
    for step in range(span.start, span.stop, config.keys):
        keys = step + tl.arange(0, config.keys)
        inside = (keys >= span.begin) & (keys < span.end)
        slots = find_slots(cache, step, keys, inside, config, MASKED)
        k = load_pairs(cache.key, slots.keys, inside, config, MASKED)
        low, high = load_scales(cache.key_scale, cache, slots, config, tile, MASKED)
        products = qk_matmul(offset_float16(k), low, high, queries)
        weights, kept, highest = weigh(products, highest, inside, queries, formula, config, MASKED)
        total = total * kept + of_threads(weights)
        v = load_columns(cache.value, value_offsets(cache, slots, config), inside, config, MASKED)
        low, high = load_scales(cache.value_scale, cache, slots, config, tile, MASKED)
        weights, kept = in_both_columns(weights), in_both_columns(kept)
        sums = summed(sums, offset_bfloat16(v), weights, kept, low, high)
    return State(highest=highest, total=total, sums=sums)


@triton.jit
def weigh(products, highest, inside, queries, formula, config: tl.constexpr, MASKED: tl.constexpr):
    """A step of the online softmax: its weights, the factor on what was summed, the new highest."""
    logits = products * queries.scale[:, None, :]
    if config.options.soft_cap:
        logits = formula.cap * tanh(logits)
    if MASKED:
        logits = tl.where(inside[None, :, None], logits, float("-inf"))
    if MASKED or config.options.soft_cap:
        new_highest = tl.maximum(highest, tl.max(logits, 1))
    else:
        # The same maximum, as scales are not negative, with fewer multiplications.
        new_highest = tl.maximum(highest, tl.max(products, 1) * queries.scale)
    shift = new_highest
    if MASKED:
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(logits - shift[:, None, :])
    return weights, tl.exp2(highest - shift)[:, None, :], new_highest


@triton.jit
def load_pairs(plane, offsets, inside, config: tl.constexpr, MASKED: tl.constexpr):
    """`[KV heads, keys, PAIRS]` of uint16."""
    pointers = pointers_of(plane, offsets, config)
    mask = inside[None, :, None]
    return tl.load(pointers, mask=mask, other=0) if MASKED else tl.load(pointers)


@triton.jit
def load_columns(plane, offsets, inside, config: tl.constexpr, MASKED: tl.constexpr):
    """`[KV heads, PAIRS, keys]`: through a tile turned afterwards no load would be asynchronous."""
    pointers = tl.permute(pointers_of(plane, offsets, config), (0, 2, 1))
    mask = inside[None, None, :]
    return tl.load(pointers, mask=mask, other=0) if MASKED else tl.load(pointers)


@triton.jit
def pointers_of(plane, offsets, config: tl.constexpr):
    heads = tl.arange(0, config.kv_heads) * PAIRS
    at = (offsets // 2)[None, :, None] + heads[:, None, None] + tl.arange(0, PAIRS)[None, None, :]
    return in_pairs(plane) + at


@triton.jit
def load_scales(
    scales, cache, slots, config: tl.constexpr, tile: tl.constexpr, MASKED: tl.constexpr
):
    """`[KV heads, keys, columns]`: of the first half's groups and of the second half's."""
    at = (row_of(cache, slots, config) * config.kv_heads)[None, :]
    pointers = scales.to(tl.pointer_type(tl.int64)) + at + tl.arange(0, config.kv_heads)[:, None]
    four = tl.load(pointers, mask=slots.inside[None, :], other=0) if MASKED else tl.load(pointers)
    return own_scale(four.to(tl.uint32), tile), own_scale((four >> 32).to(tl.uint32), tile)


@triton.jit
def own_scale(two, tile: tl.constexpr):
    """Of two scales that of each column's group."""
    bits = two[:, :, None] >> (group_of_column(tile) * 16)[None, None, :]
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def qk_matmul(k, low, high, queries):
    """`[KV heads, keys, queries]`."""
    of_low = tl.dot(k[0], queries.tiles[0], tl.broadcast_to(queries.low, low.shape))
    of_low = tl.dot(k[2], queries.tiles[2], of_low)
    of_high = tl.dot(k[1], queries.tiles[1], tl.broadcast_to(queries.high, low.shape))
    of_high = tl.dot(k[3], queries.tiles[3], of_high)
    HEADS: tl.constexpr = low.shape[0]
    KEYS: tl.constexpr = low.shape[1]
    COLUMNS: tl.constexpr = low.shape[2]
    of_groups = tl.reshape(of_low * low + of_high * high, [HEADS, KEYS, COLUMNS // 2, 2])
    return tl.sum(of_groups, 3)


@triton.jit
def summed(sums, v, weights, kept, low, high):
    """What is summed up after the values `v` of a step, `[KV heads, PAIRS, keys]` each."""
    of_low = as_operand((weights * low).to(tl.bfloat16))
    of_high = as_operand((weights * high).to(tl.bfloat16))
    ones = tl.full(v[0].shape, 1.0, tl.float32)  # the interpreter has none of bfloat16
    offset = (ones * -OFFSET_IN_BFLOAT16).to(tl.bfloat16)
    low_offset, high_offset = tl.dot(offset, of_low), tl.dot(offset, of_high)
    return (
        tl.dot(v[0], of_low, sums[0] * kept + low_offset),
        tl.dot(v[1], of_high, sums[1] * kept + high_offset),
        tl.dot(v[2], of_low, sums[2] * kept + low_offset),
        tl.dot(v[3], of_high, sums[3] * kept + high_offset),
    )


@triton.jit
def of_threads(weights):
    """Sums of the weights that each thread has."""
    HEADS: tl.constexpr = weights.shape[0]
    KEYS: tl.constexpr = weights.shape[1]
    QUERIES: tl.constexpr = weights.shape[2]
    return tl.sum(tl.reshape(weights, [HEADS, KEYS // EIGHT, EIGHT, QUERIES]), 1)


@triton.jit
def as_operand(weights):
    """The same weights, in the threads that multiply them: Triton would move them one by one."""
    if INTERPRETED or not LAYOUT_IS_KNOWN:
        return weights
    HEADS: tl.constexpr = weights.shape[0]
    KEYS: tl.constexpr = weights.shape[1]
    COLUMNS: tl.constexpr = weights.shape[2]
    # Transposes each tile of EIGHT rows and columns, which is then seen the other way around.
    turned = tl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
        "=r,r", [weights], dtype=weights.dtype, is_pure=True, pack=2,
    )  # fmt: skip
    tiles = tl.reshape(turned, [HEADS, KEYS // EIGHT, EIGHT, COLUMNS // EIGHT, EIGHT])
    return tl.reshape(tl.permute(tiles, (0, 1, 4, 3, 2)), [HEADS, KEYS, COLUMNS])


@triton.jit
def store_state(rows, task, state, config: tl.constexpr, tile: tl.constexpr):
    heads, exists = heads_of(config, tile)
    highest, total, factor = state.highest, tl.sum(state.total, 1), 1.0
    if config.options.sinks:
        mask = exists & task.has_sinks & (tl.program_id(1) == 0)
        sinks = tl.load(rows.sinks + heads, mask=mask, other=float("-inf")) * LOG2E
        highest = tl.maximum(highest, sinks)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        factor = tl.exp2(state.highest - shift)
        total = total * factor + tl.exp2(sinks - shift)
    over, log_total = finished(highest, total, False)
    tl.store(rows.lse + heads, log_total, mask=exists)
    factor = in_both_columns((factor / over)[:, None, :])
    heads, exists = in_both_columns(heads[:, None, :]), in_both_columns(exists[:, None, :])
    FIRST: tl.constexpr = (0, 64, 1, 65)
    pairs = tl.arange(0, PAIRS)
    out = rows.out + heads * config.widths.value_dim + (2 * pairs)[None, :, None]
    for i in tl.static_range(4):
        values = (state.sums[i] * factor).to(rows.out.dtype.element_ty)
        tl.store(out + FIRST[i], values, mask=exists & own_pairs(tile)[None])

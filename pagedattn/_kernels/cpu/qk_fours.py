"""Logits of keys of four bits, as they are held, with a scale for each group of their columns.

For AVX-512, and heads of a multiple of 64 columns: so each half of a row has whole groups. A vector
holds a group of each half, so the products of two groups are scaled at once.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from . import float16
from .compiling import intrinsic, within
from .dtypes import INT4, INT16, row_vector
from .fixed_point import COUNT, NO_WORDS, as_words
from .memory import get_int64
from .qk_matmul import Words, store_tile
from .simd import (
    BYTE,
    KEYS,
    LANES,
    VECTOR,
    WORDS,
    ZEROS,
    add_words,
    along,
    at,
    fused,
    int64s_at,
    load,
    picks,
    spread,
    word,
)
from .softmax import AHEAD, CHUNK
from .unpack import GROUP, fetch_row


def _numbers(builder, key, index):
    """LANES low halves of bytes, then their high ones, as int16."""
    held = load(builder, at(builder, key, index, ir.VectorType(BYTE, LANES)), 1)
    twice = as_words(builder, builder.shuffle_vector(held, held, picks([*range(LANES)] * 2)))
    to_top = ir.Constant(twice.type, [12] * LANES + [8] * LANES)
    return builder.ashr(builder.shl(twice, to_top), ir.Constant(twice.type, [12] * COUNT))


def _queries(builder, row, index, half):
    columns = index, builder.add(index, half)
    halves = (row_vector(builder, row, column, INT16, LANES) for column in columns)
    return builder.shuffle_vector(*halves, picks(range(COUNT)))


def _places(builder, index):
    """Where vectors of a group begin."""
    return [builder.add(index, word(i)) for i in range(0, GROUP, LANES)]


def _scales(builder, row, index, groups):
    """Those of the group in bytes' low bits, and of that in their high bits."""
    group = builder.udiv(index, word(GROUP))
    both = group, builder.add(group, builder.lshr(groups, word(1)))
    places = (at(builder, row, builder.mul(g, word(2)), ir.HalfType()) for g in both)
    halves = (spread(builder, builder.load(place), LANES // 2) for place in places)
    return float16.widened(builder, builder.shuffle_vector(*halves, picks(range(LANES))))


def _add(builder, total, queries, keys, scales):
    """The total plus the scaled products of vectors of two groups of columns."""
    product = NO_WORDS
    for query, key in zip(queries, keys, strict=True):
        product = add_words(builder, product, query, key)
    return fused(builder, builder.sitofp(product, VECTOR), scales, total)


def _qk(rows):
    """Makes the products of `rows` queries and KEYS keys."""

    @intrinsic
    def qk(typing, query, step, plane, offsets, scales, slots, dim, scale, logits, width):
        """Logits `[rows, KEYS]`, `width` apart, of keys whose scales are the `slots`' rows."""

        def code(context, builder, signature, args):
            if WORDS:
                _code(builder, rows, *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7, types.float32, *[types.intp] * 2), code

    return qk


def _code(builder, rows, query, step, plane, offsets, scales, slots, dim, scale, logits, width):
    half, groups = builder.lshr(dim, word(1)), builder.udiv(dim, word(GROUP))
    row_bytes = builder.mul(groups, word(2))
    starts = [builder.add(query, builder.mul(step, word(r))) for r in range(rows)]
    keys = [builder.add(plane, place) for place in int64s_at(builder, offsets, KEYS)]
    indices = int64s_at(builder, slots, KEYS)
    factors = [builder.add(scales, builder.mul(index, row_bytes)) for index in indices]
    totals = [[cgutils.alloca_once_value(builder, ZEROS) for _ in keys] for _ in starts]
    _multiply(builder, starts, half, groups, keys, factors, totals)
    found = [builder.load(total) for of_row in totals for total in of_row]
    units = [Words(INT4).factor(builder, row, dim, scale) for row in starts]
    store_tile(builder, found, units, logits, width)


def _multiply(builder, rows, half, groups, keys, factors, totals):
    """Adds the products of all rows of queries and keys along them to their totals."""

    def add(index):
        places = _places(builder, index)
        taken = [[_numbers(builder, key, place) for place in places] for key in keys]
        scales = [_scales(builder, factor, index, groups) for factor in factors]
        for row, of_row in zip(rows, totals, strict=True):
            queries = [_queries(builder, row, place, half) for place in places]
            for total, key, scale in zip(of_row, taken, scales, strict=True):
                added = _add(builder, builder.load(total), queries, key, scale)
                builder.store(added, total)

    along(builder, GROUP, word(0), half, add)


qk_1, qk_2, qk_4 = map(_qk, (1, 2, 4))


@within
def set_logits(args, queries, rows, plane, offsets, slots, head, count, scale, logits, room):
    """Logits `[rows, count]` of up to AHEAD keys, CHUNK apart; the next ones are fetched."""
    step, dim = args.row_bytes, args.head_dim
    scales = args.key_scales + 2 * head * (dim // GROUP)
    for k in range(count):
        fetch_row(plane + get_int64(offsets, k + AHEAD), dim // 2)
    for k in range(0, count, KEYS):
        keys, slot, out, row, r = offsets + 8 * k, slots + 8 * k, logits + 4 * k, queries, 0
        while r + 4 <= rows:
            qk_4(row, step, plane, keys, scales, slot, dim, scale, out, CHUNK)
            r, row, out = r + 4, row + 4 * step, out + 16 * CHUNK
        if r + 2 <= rows:
            qk_2(row, step, plane, keys, scales, slot, dim, scale, out, CHUNK)
            r, row, out = r + 2, row + 2 * step, out + 8 * CHUNK
        if r < rows:
            qk_1(row, step, plane, keys, scales, slot, dim, scale, out, CHUNK)

"""Logits of keys of four bits, as they are held, with a scale for each group of their columns.

For CPUs with 16-bit integers in AVX-512, and heads of a multiple of 64 columns: each half of a row
has whole groups. 16 bytes fill a vector, the numbers in their low bits its first half and those in
their high bits the other. So the products of two vectors are those of two groups, and are added up
before the groups' scales multiply them.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from . import float16
from .compiling import intrinsic, within
from .dtypes import INT16, row_vector
from .fixed_point import COUNT, NO_WORDS, as_words, factor_of, whole_vectors
from .memory import get_int64
from .qk_matmul import store_tile
from .simd import (
    BYTE,
    KEYS,
    LANES,
    VECTOR,
    WORD,
    ZEROS,
    add_words,
    along,
    at,
    fused,
    load,
    picks,
    spread,
    word,
)
from .softmax import CHUNK
from .softmax import GROUP as KEYS_AHEAD
from .unpack import AS_FOURS, GROUP, fetch_row

HALF = LANES // 2


def _numbers(builder, row, index):
    """Those in the low bits of LANES bytes of a row, and behind them those in the high bits."""
    held = load(builder, at(builder, row, index, ir.VectorType(BYTE, LANES)), 1)
    twice = as_words(builder, builder.shuffle_vector(held, held, picks([*range(LANES)] * 2)))
    to_top = ir.Constant(twice.type, [12] * LANES + [8] * LANES)
    return builder.ashr(builder.shl(twice, to_top), ir.Constant(twice.type, [12] * COUNT))


def _queries(builder, row, index, half):
    """The columns of a query that go with `_numbers`."""
    parts = (row_vector(builder, row, i, INT16, LANES) for i in (index, builder.add(index, half)))
    return builder.shuffle_vector(*parts, picks(range(COUNT)))


def _scales(builder, row, group, groups):
    """The float16 scales of a group and of that half a row further, each in half of the lanes."""
    both = group, builder.add(group, builder.lshr(groups, word(1)))
    places = (at(builder, row, builder.mul(g, word(2)), ir.HalfType()) for g in both)
    held = [spread(builder, builder.load(place), HALF) for place in places]
    return float16.widened(builder, builder.shuffle_vector(*held, picks(range(LANES))))


def _qk(rows):
    """Makes the products of `rows` queries and KEYS keys."""

    @intrinsic
    def qk(typing, query, step, plane, offsets, scales, slots, dim, scale, logits, width):
        """Logits `[rows, KEYS]`, `width` apart, of keys whose scales are the `slots`' rows."""

        def code(context, builder, signature, args):
            if not AS_FOURS:
                return context.get_dummy_value()
            query, step, plane, offsets, scales, slots, dim, scale, logits, width = args
            tile = [(r, k) for r in range(rows) for k in range(KEYS)]
            totals = {place: cgutils.alloca_once_value(builder, ZEROS) for place in tile}
            half, groups = builder.lshr(dim, word(1)), builder.udiv(dim, word(GROUP))
            places = (at(builder, offsets, word(8 * k), WORD) for k in range(KEYS))
            keys = [builder.add(plane, builder.load(place)) for place in places]
            places = (at(builder, slots, word(8 * k), WORD) for k in range(KEYS))
            row_bytes = builder.mul(groups, word(2))
            rows_before = (builder.mul(builder.load(place), row_bytes) for place in places)
            factors = [builder.add(scales, offset) for offset in rows_before]
            starts = [builder.add(query, builder.mul(step, word(r))) for r in range(rows)]

            def add(index):
                places = [builder.add(index, word(start)) for start in range(0, GROUP, LANES)]
                taken = [[_numbers(builder, key, place) for place in places] for key in keys]
                group = builder.udiv(index, word(GROUP))
                held = [_scales(builder, row, group, groups) for row in factors]
                for r, start in enumerate(starts):
                    row = [_queries(builder, start, place, half) for place in places]
                    for k in range(KEYS):
                        product = NO_WORDS
                        for numbers in zip(row, taken[k], strict=True):
                            product = add_words(builder, product, *numbers)
                        product = builder.sitofp(product, VECTOR)
                        total = builder.load(totals[r, k])
                        builder.store(fused(builder, product, held[k], total), totals[r, k])

            along(builder, GROUP, word(0), half, add)
            found = [builder.load(totals[place]) for place in tile]
            count = whole_vectors(builder, dim)
            units = [builder.fmul(scale, factor_of(builder, row, count)) for row in starts]
            store_tile(builder, found, units, logits, width)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7, types.float32, *[types.intp] * 2), code

    return qk


qk_1, qk_2, qk_4 = map(_qk, (1, 2, 4))


@within
def set_logits(args, queries, rows, plane, offsets, slots, head, count, scale, logits):
    """Logits `[rows, count]` of up to KEYS_AHEAD keys, CHUNK apart; the next ones are fetched."""
    step, dim = args.row_bytes, args.head_dim
    scales = args.key_scales + 2 * head * (dim // GROUP)
    for k in range(count):
        fetch_row(plane + get_int64(offsets, k + KEYS_AHEAD), dim // 2)
    for k in range(0, count, KEYS):
        at, slot, out, row, r = offsets + 8 * k, slots + 8 * k, logits + 4 * k, queries, 0
        while r + 4 <= rows:
            qk_4(row, step, plane, at, scales, slot, dim, scale, out, CHUNK)
            r, row, out = r + 4, row + 4 * step, out + 16 * CHUNK
        if r + 2 <= rows:
            qk_2(row, step, plane, at, scales, slot, dim, scale, out, CHUNK)
            r, row, out = r + 2, row + 2 * step, out + 8 * CHUNK
        if r < rows:
            qk_1(row, step, plane, at, scales, slot, dim, scale, out, CHUNK)

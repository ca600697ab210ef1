"""Sums of values of four bits, as they are held, with a scale for each group of their columns.

Where `qk_fours` computes the logits. A value's scales multiply its weight, which so is another one
for each group: a product of 16-bit integers, of which the upper 16 bits are kept.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from . import float16
from .compiling import fast, intrinsic, within
from .fixed_point import COUNT, NO_WORDS, NUMBER, as_words, factor_of, set_words
from .memory import get_float32, get_int32, get_int64, put_int32
from .simd import (
    BYTE,
    FLOAT,
    INTEGERS,
    LANES,
    VECTOR,
    WORD,
    add_words,
    along,
    at,
    fused,
    load,
    picks,
    rounded_products,
    spread,
    store,
    word,
)
from .softmax import CHUNK, NONE
from .unpack import AS_FOURS, GROUP, fetch_row

ROWS = 4  # whose weights of all groups are there at once
MIXED = [[lane + row for lane in range(s, s + LANES) for row in (0, COUNT)] for s in (0, LANES)]


def _words(builder, row, index):
    """COUNT bytes of a row, as words."""
    return as_words(builder, load(builder, at(builder, row, index, ir.VectorType(BYTE, COUNT)), 1))


def _halves(builder, words):
    """The numbers in the low and in the high bits of bytes, as words."""
    low, high = (ir.Constant(words.type, [by] * COUNT) for by in (12, 4))
    return builder.ashr(builder.shl(words, low), low), builder.ashr(words, high)


def _pv(rows):
    """Makes the sums of value rows by the weights of `rows` queries."""

    @intrinsic
    def pv(typing, sums, step, plane, offsets, count, dim, products, weights, scales, kept):
        """`sums[r] = sums[r] * kept[r] + weights[r] @ values`, by `products` of `set_products`."""

        def code(context, builder, signature, args):
            if not AS_FOURS:
                return context.get_dummy_value()
            sums, step, plane, offsets, count, dim, products, weights, scales, kept = args
            half = builder.lshr(dim, word(1))
            turns = builder.udiv(builder.add(count, word(1)), word(2))

            def add(index):
                parts = index, builder.add(index, half)
                groups = [builder.udiv(part, word(GROUP)) for part in parts]
                tile = [(r, p, v) for r in range(rows) for p in range(2) for v in range(2)]
                totals = {place: cgutils.alloca_once(builder, INTEGERS) for place in tile}
                for total in totals.values():
                    builder.store(NO_WORDS, total)
                own = {
                    (r, p): builder.add(products, _products_at(builder, groups[p], r))
                    for r in range(rows)
                    for p in range(2)
                }
                with cgutils.for_range(builder, turns) as loop:
                    pair = builder.mul(loop.index, word(16))
                    held = [
                        builder.load(at(builder, offsets, builder.add(pair, word(8 * i)), WORD))
                        for i in range(2)
                    ]
                    held = [_words(builder, builder.add(plane, row), index) for row in held]
                    both = [builder.shuffle_vector(*held, picks(lanes)) for lanes in MIXED]
                    values = [_halves(builder, words) for words in both]
                    four = builder.mul(loop.index, word(4))
                    for (r, p), row in own.items():
                        weight = load(builder, at(builder, row, four, NUMBER), 4)
                        weight = builder.bitcast(spread(builder, weight), values[0][p].type)
                        for v in range(2):
                            total = builder.load(totals[r, p, v])
                            total = add_words(builder, total, weight, values[v][p])
                            builder.store(total, totals[r, p, v])
                for r, p, v in tile:
                    column = builder.mul(builder.add(parts[p], word(v * LANES)), word(4))
                    start = builder.add(sums, builder.mul(step, word(r)))
                    place = at(builder, start, column, VECTOR)
                    old = spread(builder, builder.load(at(builder, kept, word(4 * r), FLOAT)))
                    unit = spread(builder, _unit(builder, weights, r, scales, groups[p]))
                    total = builder.sitofp(builder.load(totals[r, p, v]), VECTOR)
                    before = builder.fmul(load(builder, place, 4), old)
                    store(builder, fused(builder, total, unit, before), place, 4)

            along(builder, GROUP, word(0), half, add)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 10), code

    return pv


def _products_at(builder, group, row):
    place = builder.add(builder.mul(group, word(ROWS)), word(row))
    return builder.mul(place, word(2 * CHUNK))


def _unit(builder, weights, row, scales, group):
    """What the products of a row and a group are multiples of."""
    weights = builder.add(weights, word(4 * CHUNK * row))
    scales = builder.add(scales, builder.mul(group, word(4 * CHUNK)))
    factors = (factor_of(builder, held, word(CHUNK)) for held in (weights, scales))
    return builder.fmul(builder.fmul(*factors), FLOAT(2.0**15))


pv_1, pv_2, pv_4 = map(_pv, (1, 2, 4))


@intrinsic
def set_chunk(typing, row):
    """`set_words` of the weights or scales of a chunk."""

    def code(context, builder, signature, args):
        if AS_FOURS:
            set_words(builder, args[0], word(CHUNK))
        return context.get_dummy_value()

    return types.void(types.intp), code


@intrinsic
def set_products(typing, weights, scales, out):
    """Those of the weights and scales of a chunk, which are as `set_chunk` left them."""

    def code(context, builder, signature, args):
        if not AS_FOURS:
            return context.get_dummy_value()
        *rows, out = args
        words = ir.VectorType(ir.IntType(16), COUNT)

        def multiply(index):
            place = builder.mul(index, word(2))
            pair = (load(builder, at(builder, row, place, words), 2) for row in rows)
            store(builder, rounded_products(builder, *pair), at(builder, out, place, words), 2)

        along(builder, COUNT, word(0), word(CHUNK), multiply)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), code


@intrinsic
def _part(typing, row, other):
    """Pairs of float16 of a chunk as two rows of float32; the first is where the pairs are."""

    def code(context, builder, signature, args):
        def part(index):
            four = builder.mul(index, word(4))
            pairs = load(builder, at(builder, args[0], four, INTEGERS), 4)
            for row, by in zip(args, (0, 16), strict=True):
                halves = builder.lshr(pairs, ir.Constant(INTEGERS, [by] * LANES))
                halves = builder.trunc(halves, ir.VectorType(ir.IntType(16), LANES))
                halves = builder.bitcast(halves, ir.VectorType(ir.HalfType(), LANES))
                numbers = float16.widened(builder, halves)
                store(builder, numbers, at(builder, row, four, VECTOR), 4)

        along(builder, LANES, word(0), word(CHUNK), part)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), code


@fast
def set_scales(scales, groups, slots, shown, out):
    """The scales of a chunk's values, `[groups, CHUNK]`; 0 where no row sees one: it may be NaN."""
    for group in range(0, groups, 2):
        row = out + 4 * CHUNK * group
        for k in range(CHUNK):
            pair = get_int32(scales + 2 * groups * get_int64(slots, k), group // 2)
            hidden = shown != 0 and get_float32(shown, k) == NONE
            put_int32(row, k, 0 if hidden else pair)
        _part(row, row + 4 * CHUNK)
        set_chunk(row)
        set_chunk(row + 4 * CHUNK)


@within
def add_values(
    args, sums, rows, plane, offsets, later, ahead, slots, head, count, weights, kept, shown, room
):
    """`sums = sums * kept + weights @ values`, for the rows of a KV head.

    `room` holds the scales of each group, and behind them the products of ROWS rows with each.
    """
    step, dim = args.row_bytes, args.value_columns
    groups, r = dim // GROUP, 0
    own = room + 4 * CHUNK * groups
    for k in range(count):
        fetch_row(later + get_int64(ahead, k), dim // 2)
    set_scales(args.value_scales + 2 * head * groups, groups, slots, shown, room)
    for row in range(rows):
        set_chunk(weights + 4 * CHUNK * row)
    while r < rows:
        many = 4 if r + 4 <= rows else 2 if r + 2 <= rows else 1
        held = weights + 4 * CHUNK * r
        for group in range(groups):
            for i in range(many):
                out = own + 2 * CHUNK * (ROWS * group + i)
                set_products(held + 4 * CHUNK * i, room + 4 * CHUNK * group, out)
        at, factors = sums + r * step, kept + 4 * r
        if many == 4:
            pv_4(at, step, plane, offsets, count, dim, own, held, room, factors)
        elif many == 2:
            pv_2(at, step, plane, offsets, count, dim, own, held, room, factors)
        else:
            pv_1(at, step, plane, offsets, count, dim, own, held, room, factors)
        r += many

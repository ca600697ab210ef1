"""Sums of values of four bits, as they are held, with a scale for each group of their columns.

For CPUs with products of pairs of bfloat16, and heads of a multiple of 64 columns: so a vector of
32 numbers is one group of columns. A value's scales multiply its weight, which so is another one
for each group.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from . import float16
from .compiling import fast, intrinsic, within
from .memory import get_float32, get_int32, get_int64, put_int32
from .simd import (
    BYTE,
    FLOAT,
    INTEGERS,
    LANES,
    LOOK_UPS,
    VECTOR,
    WORD,
    add_pairs,
    along,
    as_bfloat16,
    at,
    load,
    permuted,
    picks,
    spread,
    store,
    word,
)
from .softmax import CHUNK, NONE
from .unpack import GROUP, fetch_row

WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)
# bfloat16 of 0 to 7 and of -8 to -1, in the order of their four bits: the upper half of float32.
NUMBERS = [0, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0]
NUMBERS += [0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80]


def _bits(builder, row, index):
    """32 bytes of a row, of 16 bits each."""
    bytes_ = ir.VectorType(BYTE, 2 * LANES)
    return builder.zext(load(builder, at(builder, row, index, bytes_), 1), WORDS)


def _halves(builder, bits):
    """The numbers in the low and in the high bits of bytes, as bfloat16."""
    low = builder.and_(bits, ir.Constant(WORDS, [15] * 2 * LANES))
    high = builder.lshr(bits, ir.Constant(WORDS, [4] * 2 * LANES))
    table = ir.Constant(WORDS, NUMBERS * 2)
    return [permuted(builder, table, lanes) for lanes in (low, high)]


def _pv(rows):
    """Makes the sums of value rows by the weights of `rows` queries."""

    @intrinsic
    def pv(typing, sums, step, plane, offsets, count, dim, weights, kept):
        """`sums[r] = sums[r] * kept[r] + weights[r] @ values`, by weights of `set_weights`."""

        def code(context, builder, signature, args):
            if not LOOK_UPS:
                return context.get_dummy_value()
            sums, step, plane, offsets, count, dim, weights, kept = args
            half = builder.lshr(dim, word(1))
            turns = builder.udiv(builder.add(count, word(1)), word(2))
            number = ir.IntType(32)
            mixed = [
                [lane + row for lane in range(start, start + LANES) for row in (0, 2 * LANES)]
                for start in (0, LANES)
            ]

            def add(index):
                parts = index, builder.add(index, half)
                tile = [(r, p, v) for r in range(rows) for p in range(2) for v in range(2)]
                places, totals = {}, {}
                for r, p, v in tile:
                    column = builder.mul(builder.add(parts[p], word(v * LANES)), word(4))
                    start = builder.add(sums, builder.mul(step, word(r)))
                    places[r, p, v] = at(builder, start, column, VECTOR)
                    factor = builder.load(at(builder, kept, word(4 * r), FLOAT))
                    total = load(builder, places[r, p, v], 4)
                    total = builder.fmul(total, spread(builder, factor))
                    totals[r, p, v] = cgutils.alloca_once_value(builder, total)
                groups = [builder.udiv(part, word(GROUP)) for part in parts]
                own = [
                    builder.add(weights, builder.mul(group, word(4 * 2 * CHUNK)))
                    for group in groups
                ]
                with cgutils.for_range(builder, turns) as loop:
                    pair = builder.mul(loop.index, word(16))
                    held = [
                        builder.load(at(builder, offsets, builder.add(pair, word(8 * i)), WORD))
                        for i in range(2)
                    ]
                    held = [_bits(builder, builder.add(plane, row), index) for row in held]
                    both = [builder.shuffle_vector(*held, picks(lanes)) for lanes in mixed]
                    values = [_halves(builder, bits) for bits in both]
                    four = builder.mul(loop.index, word(4))
                    for r in range(rows):
                        for p in range(2):
                            place = builder.add(own[p], builder.add(four, word(2 * CHUNK * r)))
                            weight = load(builder, at(builder, place, word(0), number), 4)
                            weight = builder.bitcast(spread(builder, weight), WORDS)
                            for v in range(2):
                                total = builder.load(totals[r, p, v])
                                total = add_pairs(builder, total, weight, values[v][p])
                                builder.store(total, totals[r, p, v])
                for place in tile:
                    store(builder, builder.load(totals[place]), places[place], 4)

            along(builder, GROUP, word(0), half, add)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8), code

    return pv


pv_1, pv_2, pv_4 = map(_pv, (1, 2, 4))


@intrinsic
def set_weights(typing, weights, factors, out):
    """A row of float32 weights of a chunk, times the scales of a group, as bfloat16."""

    def code(context, builder, signature, args):
        if not LOOK_UPS:
            return context.get_dummy_value()
        weights, factors, out = args

        def narrow(index):
            four = builder.mul(index, word(4))
            pair = [load(builder, at(builder, row, four, VECTOR), 4) for row in (weights, factors)]
            numbers = as_bfloat16(builder, builder.fmul(*pair))
            place = at(builder, out, builder.mul(index, word(2)), numbers.type)
            store(builder, numbers, place, 2)

        along(builder, LANES, word(0), word(CHUNK), narrow)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), code


@intrinsic
def _part(typing, row, other):
    """Pairs of float16 of a chunk as two rows of float32; the first is where the pairs are."""

    def code(context, builder, signature, args):
        if not LOOK_UPS:
            return context.get_dummy_value()

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


@within
def add_values(
    args, sums, rows, plane, offsets, later, ahead, slots, head, count, weights, kept, shown, room
):
    """`sums = sums * kept + weights @ values`, for the rows of a KV head.

    `room` holds the scales of each group, and behind them weights of four rows for each.
    """
    step, dim = args.row_bytes, args.value_columns
    groups, r = dim // GROUP, 0
    own = room + 4 * CHUNK * groups
    for k in range(count):
        fetch_row(later + get_int64(ahead, k), dim // 2)
    set_scales(args.value_scales + 2 * head * groups, groups, slots, shown, room)
    while r < rows:
        many = 4 if r + 4 <= rows else 2 if r + 2 <= rows else 1
        for group in range(groups):
            for i in range(many):
                out = own + 2 * CHUNK * (4 * group + i)
                set_weights(weights + 4 * CHUNK * (r + i), room + 4 * CHUNK * group, out)
        at, factors = sums + r * step, kept + 4 * r
        if many == 4:
            pv_4(at, step, plane, offsets, count, dim, own, factors)
        elif many == 2:
            pv_2(at, step, plane, offsets, count, dim, own, factors)
        else:
            pv_1(at, step, plane, offsets, count, dim, own, factors)
        r += many

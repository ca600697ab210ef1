"""Products of short queries with keys and values of four bits, as they are held.

For CPUs with products of pairs of bfloat16, and heads of a multiple of 64 columns: so a vector of
32 numbers is one group of columns. Its products are summed up alone, and then multiplied by the
group's scale; a value's scales multiply its weight, which so is another one for each group.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from . import float16
from .compiling import fast, intrinsic, within
from .dtypes import BFLOAT16, row_vector
from .memory import get_float32, get_int64, put_float32
from .qk_matmul import store_tile
from .simd import (
    BYTE,
    FLOAT,
    KEYS,
    LANES,
    LOOK_UPS,
    VECTOR,
    WORD,
    ZEROS,
    add_pairs,
    along,
    as_bfloat16,
    at,
    fused,
    load,
    permuted,
    picks,
    spread,
    store,
    word,
)
from .softmax import CHUNK, NONE, ZERO
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


def _scale(builder, scales, group):
    """The float16 scale of a group in all lanes of float32."""
    place = at(builder, scales, builder.mul(group, word(2)), ir.HalfType())
    return float16.widened(builder, spread(builder, builder.load(place)))


def _qk(rows):
    """Makes the products of `rows` queries and KEYS keys."""

    @intrinsic
    def qk(typing, query, step, plane, offsets, scales, slots, dim, scale, logits, width):
        """Logits `[rows, KEYS]`, `width` apart, of keys whose scales are the `slots`' rows."""

        def code(context, builder, signature, args):
            if not LOOK_UPS:
                return context.get_dummy_value()
            query, step, plane, offsets, scales, slots, dim, scale, logits, width = args
            tile = [(r, k) for r in range(rows) for k in range(KEYS)]
            totals = {place: cgutils.alloca_once_value(builder, ZEROS) for place in tile}
            half, groups = builder.lshr(dim, word(1)), builder.udiv(dim, word(GROUP))
            keys, factors = [], []
            for k in range(KEYS):
                offset = builder.load(at(builder, offsets, word(8 * k), WORD))
                slot = builder.load(at(builder, slots, word(8 * k), WORD))
                keys.append(builder.add(plane, offset))
                row = builder.mul(builder.mul(slot, groups), word(2))
                factors.append(builder.add(scales, row))
            starts = [builder.add(query, builder.mul(step, word(r))) for r in range(rows)]

            def add(index):
                taken = [_halves(builder, _bits(builder, key, index)) for key in keys]
                for part, begin in enumerate((index, builder.add(index, half))):
                    group = builder.udiv(begin, word(GROUP))
                    held = [_scale(builder, row, group) for row in factors]
                    for r, start in enumerate(starts):
                        row = row_vector(builder, start, begin, BFLOAT16, 2 * LANES)
                        for k in range(KEYS):
                            product = add_pairs(builder, ZEROS, row, taken[k][part])
                            total = builder.load(totals[r, k])
                            builder.store(fused(builder, product, held[k], total), totals[r, k])

            along(builder, GROUP, word(0), half, add)
            found = [builder.load(totals[place]) for place in tile]
            store_tile(builder, found, rows, scale, logits, width)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7, types.float32, *[types.intp] * 2), code

    return qk


qk_1, qk_2, qk_4 = map(_qk, (1, 2, 4))


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
def get_float16(typing, address, index):
    def code(context, builder, signature, args):
        if not LOOK_UPS:
            return ir.Constant(FLOAT, 0.0)
        address, index = args
        place = at(builder, address, builder.mul(index, word(2)), ir.HalfType())
        return builder.fpext(builder.load(place), FLOAT)

    return types.float32(types.intp, types.intp), code


@within
def set_logits(args, queries, rows, plane, offsets, slots, head, count, scale, logits):
    """Logits `[rows, count]` of some keys, CHUNK apart, while those of the next are fetched."""
    step, dim = args.row_bytes, args.head_dim
    scales = args.key_scales + 2 * head * (dim // GROUP)
    for k in range(count):
        fetch_row(plane + get_int64(offsets, k + 4 * KEYS), dim // 2)
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
    set_factors(args.value_scales + 2 * head * groups, groups, slots, shown, room)
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


@fast
def set_factors(scales, groups, slots, shown, out):
    """The scales of a chunk's values, `[groups, CHUNK]`; 0 where no row sees one: it may be NaN."""
    for k in range(CHUNK):
        row = scales + 2 * groups * get_int64(slots, k)
        hidden = shown != 0 and get_float32(shown, k) == NONE
        for group in range(groups):
            factor = ZERO if hidden else get_float16(row, group)
            put_float32(out, group * CHUNK + k, factor)

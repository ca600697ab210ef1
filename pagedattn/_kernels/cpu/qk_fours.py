"""Logits of keys of four bits, a key in each lane, with a scale for each group of their columns.

For AVX2 and AVX-512, and heads of a multiple of 64 columns: so each half of a row has whole groups.
Eight or sixteen keys are transposed in registers: then their scales are a vector, and no sum goes
across lanes.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .compiling import intrinsic, within
from .dtypes import INT4
from .fixed_point import NO_WORDS
from .fours_scales import set_scales
from .memory import get_int64
from .qk_matmul import Words
from .simd import (
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
    store,
    word,
)
from .softmax import AHEAD, CHUNK, ONE
from .unpack import GROUP, fetch_row
from .unpack_chunk import rows_of

NUMBER = ir.IntType(32)
PAIRS = ir.VectorType(ir.IntType(16), 2 * LANES)  # of columns, of each key
SIZE = 4 * LANES  # bytes of a vector
PIECE = 16  # bytes of a key that are transposed at once


def _of_quarters(*lanes):
    """Some lanes of each four of two vectors, counted in both."""
    both = [lane % 4 + lane // 4 * LANES for lane in lanes]
    return picks([four + lane for four in range(0, LANES, 4) for lane in both])


LOW_32, HIGH_32 = _of_quarters(0, 4, 1, 5), _of_quarters(2, 6, 3, 7)
LOW_64, HIGH_64 = _of_quarters(0, 1, 4, 5), _of_quarters(2, 3, 6, 7)


def _transposed(builder, keys, index):
    """PIECE bytes of each key from `index` on, four to a vector."""
    kind = ir.VectorType(NUMBER, PIECE // 4)
    rows = [load(builder, at(builder, key, index, kind), 1) for key in keys]
    a, b, c, d = (_joined(builder, rows[k::4]) for k in range(4))
    halves = [[builder.shuffle_vector(*p, w) for p in ((a, b), (c, d))] for w in (LOW_32, HIGH_32)]
    return [builder.shuffle_vector(*half, w) for half in halves for w in (LOW_64, HIGH_64)]


def _joined(builder, parts):
    """Vectors one behind the other."""
    while len(parts) > 1:
        both = picks(range(2 * parts[0].type.count))
        halves = zip(parts[::2], parts[1::2], strict=True)
        parts = [builder.shuffle_vector(*pair, both) for pair in halves]
    return parts[0]


def _pairs(builder, bits):
    """Of four bytes of each key the pairs of low bits, and those of high bits: columns in order."""
    order = [4 * lane + byte for lane in range(LANES) for byte in (0, 2, 1, 3)]
    bytes_ = builder.bitcast(bits, ir.VectorType(ir.IntType(8), SIZE))
    words = builder.bitcast(builder.shuffle_vector(bytes_, bytes_, picks(order)), PAIRS)
    tops = [builder.shl(words, _all(up)) for up in (12, 4, 8, 0)]
    numbers = [builder.ashr(top, _all(12)) for top in tops]
    return numbers[:2], numbers[2:]


def _all(number):
    return ir.Constant(PAIRS, [number] * PAIRS.count)


def _qk(rows):
    """Makes the products of `rows` queries and LANES keys."""

    @intrinsic
    def qk(typing, query, step, plane, offsets, scales, dim, scale, logits, width):
        """Logits `[rows, LANES]`, `width` apart, of keys whose scales are by `set_scales`."""

        def code(context, builder, signature, args):
            if WORDS:
                _code(builder, rows, *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6, types.float32, *[types.intp] * 2), code

    return qk


def _code(builder, rows, query, step, plane, offsets, scales, dim, scale, logits, width):
    starts = [builder.add(query, builder.mul(step, word(r))) for r in range(rows)]
    keys = [builder.add(plane, number) for number in int64s_at(builder, offsets, LANES)]
    totals = [cgutils.alloca_once_value(builder, ZEROS) for _ in starts]
    half = builder.lshr(dim, word(1))

    def add(index):
        columns = index, builder.add(index, half)
        products = _products(builder, starts, keys, columns)
        for column, of_rows in zip(columns, products, strict=True):
            place = at(builder, scales, builder.mul(column, word(SIZE // GROUP)), VECTOR)
            factor = load(builder, place, 4)
            for total, product in zip(totals, of_rows, strict=True):
                number = builder.sitofp(product, VECTOR)
                builder.store(fused(builder, number, factor, builder.load(total)), total)

    along(builder, GROUP, word(0), half, add)
    for r, (start, total) in enumerate(zip(starts, totals, strict=True)):
        unit = spread(builder, Words(INT4).factor(builder, start, dim, scale))
        target = at(builder, logits, builder.mul(width, word(4 * r)), VECTOR)
        store(builder, builder.fmul(builder.load(total), unit), target, 4)


def _products(builder, rows, keys, columns):
    """Sums of the products of each row and the keys, of a group of columns of each half."""
    sums = [[NO_WORDS] * len(rows) for _ in columns]
    for start in range(0, GROUP, PIECE):
        pieces = _transposed(builder, keys, builder.add(columns[0], word(start)))
        for first, bits in zip(range(start, start + PIECE, 4), pieces, strict=True):
            for h, pairs in enumerate(_pairs(builder, bits)):
                for column, pair in zip((first, first + 2), pairs, strict=True):
                    place = builder.add(columns[h], word(column))
                    queries = [_pair_of(builder, row, place) for row in rows]
                    added = zip(sums[h], queries, strict=True)
                    sums[h] = [add_words(builder, total, query, pair) for total, query in added]
    return sums


def _pair_of(builder, row, column):
    """Two columns of a query, for all keys."""
    place = at(builder, row, builder.mul(column, word(2)), NUMBER)
    return builder.bitcast(spread(builder, load(builder, place, 4)), PAIRS)


qk_1, qk_2, qk_4 = map(_qk, (1, 2, 4))


@within
def set_logits(args, queries, rows, plane, offsets, slots, head, count, scale, logits, room):
    """Logits `[rows, count]` of up to AHEAD keys, CHUNK apart; the next ones are fetched.

    `packed_room` has room for their scales.
    """
    step, dim = args.row_bytes, args.head_dim
    scales = args.key_scales + 2 * head * (dim // GROUP)
    factors = rows_of(room.tokens)
    for k in range(count):
        fetch_row(plane + get_int64(offsets, k + AHEAD), dim // 2)
    for k in range(0, count, LANES):
        keys, row, out, r = offsets + 8 * k, queries, logits + 4 * k, 0
        set_scales(scales, slots + 8 * k, dim, ONE, factors, SIZE)
        while r + 4 <= rows:
            qk_4(row, step, plane, keys, factors, dim, scale, out, CHUNK)
            r, row, out = r + 4, row + 4 * step, out + 16 * CHUNK
        if r + 2 <= rows:
            qk_2(row, step, plane, keys, factors, dim, scale, out, CHUNK)
            r, row, out = r + 2, row + 2 * step, out + 8 * CHUNK
        if r < rows:
            qk_1(row, step, plane, keys, factors, dim, scale, out, CHUNK)

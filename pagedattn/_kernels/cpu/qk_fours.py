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
    NUMBER,
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

PAIRS = ir.VectorType(ir.IntType(16), 2 * LANES)  # of columns, of each key
SIZE = 4 * LANES  # bytes of a vector
PIECE = 16  # bytes of a key that are transposed at once
# Of keys, for which a query is loaded once: with AVX-512 there are registers for two.
VECTORS = 2 if LANES == 16 else 1
AT_ONCE = VECTORS * LANES
STEP = max(AT_ONCE, AHEAD)  # keys whose logits are computed head by head


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
    """Makes the products of `rows` queries and AT_ONCE keys."""

    @intrinsic
    def qk(typing, query, step, plane, offsets, scales, dim, scale, logits, width):
        """Logits of keys whose scales are by `set_scales`; rows of them are `width` apart."""

        def code(context, builder, signature, args):
            if WORDS:
                _code(builder, rows, *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6, types.float32, *[types.intp] * 2), code

    return qk


def _code(builder, rows, query, step, plane, offsets, scales, dim, scale, logits, width):
    starts = [builder.add(query, builder.mul(step, word(r))) for r in range(rows)]
    lines = [builder.add(plane, number) for number in int64s_at(builder, offsets, AT_ONCE)]
    keys = [lines[begin : begin + LANES] for begin in range(0, AT_ONCE, LANES)]
    totals = [[cgutils.alloca_once_value(builder, ZEROS) for _ in starts] for _ in keys]
    half = builder.lshr(dim, word(1))

    def add(index):
        columns = index, builder.add(index, half)
        products = _products(builder, starts, keys, columns)
        for column, of_vectors in zip(columns, products, strict=True):
            group = builder.add(scales, builder.mul(column, word(VECTORS * SIZE // GROUP)))
            for v, of_rows in enumerate(of_vectors):
                factor = load(builder, at(builder, group, word(v * SIZE), VECTOR), 4)
                for total, product in zip(totals[v], of_rows, strict=True):
                    number = builder.sitofp(product, VECTOR)
                    builder.store(fused(builder, number, factor, builder.load(total)), total)

    along(builder, GROUP, word(0), half, add)
    for r, start in enumerate(starts):
        unit = spread(builder, Words(INT4).factor(builder, start, dim, scale))
        row = builder.add(logits, builder.mul(width, word(4 * r)))
        for v in range(VECTORS):
            logit = builder.fmul(builder.load(totals[v][r]), unit)
            store(builder, logit, at(builder, row, word(v * SIZE), VECTOR), 4)


def _products(builder, rows, keys, columns):
    """Sums of the products of a group of columns of each half: of vectors of keys, and rows."""
    sums = [[[NO_WORDS] * len(rows) for _ in keys] for _ in columns]
    for h, first, vectors in _numbers_of(builder, keys, columns[0]):
        for i in range(2):
            place = builder.add(columns[h], word(first + 2 * i))
            _add(builder, sums[h], rows, place, [pairs[i] for pairs in vectors])
    return sums


def _numbers_of(builder, keys, column):
    """Four columns of a half: which, the first of them, and their two pairs in each vector."""
    for start in range(0, GROUP, PIECE):
        place = builder.add(column, word(start))
        pieces = zip(*(_transposed(builder, lanes, place) for lanes in keys), strict=True)
        for first, bits in zip(range(start, start + PIECE, 4), pieces, strict=True):
            halves = zip(*(_pairs(builder, four) for four in bits), strict=True)
            yield from ((h, first, vectors) for h, vectors in enumerate(halves))


def _add(builder, sums, rows, column, pairs):
    """Adds the products of two columns, for which a row is loaded once, to `sums[vector][row]`."""
    for r, row in enumerate(rows):
        query = _pair_of(builder, row, column)
        for of_rows, pair in zip(sums, pairs, strict=True):
            of_rows[r] = add_words(builder, of_rows[r], query, pair)


def _pair_of(builder, row, column):
    """Two columns of a query, for all keys."""
    place = at(builder, row, builder.mul(column, word(2)), NUMBER)
    return builder.bitcast(spread(builder, load(builder, place, 4)), PAIRS)


qk_1, qk_2, qk_4 = map(_qk, (1, 2, 4))


@within
def set_logits(args, queries, rows, plane, offsets, slots, head, count, scale, logits, room):
    """Logits `[rows, count]` of up to STEP keys, CHUNK apart; the next ones are fetched.

    `packed_room` has room for their scales.
    """
    step, dim = args.row_bytes, args.head_dim
    scales = args.key_scales + 2 * head * (dim // GROUP)
    factors = rows_of(room.tokens)
    for k in range(count):
        fetch_row(plane + get_int64(offsets, k + STEP), dim // 2)
    for k in range(0, count, AT_ONCE):
        keys, row, out, r = offsets + 8 * k, queries, logits + 4 * k, 0
        for v in range(VECTORS):
            tokens = slots + 8 * (k + v * LANES)
            set_scales(scales, tokens, dim, ONE, factors + v * SIZE, VECTORS * SIZE)
        while r + 4 <= rows:
            qk_4(row, step, plane, keys, factors, dim, scale, out, CHUNK)
            r, row, out = r + 4, row + 4 * step, out + 16 * CHUNK
        if r + 2 <= rows:
            qk_2(row, step, plane, keys, factors, dim, scale, out, CHUNK)
            r, row, out = r + 2, row + 2 * step, out + 8 * CHUNK
        if r < rows:
            qk_1(row, step, plane, keys, factors, dim, scale, out, CHUNK)

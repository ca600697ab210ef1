"""Logits of keys of four bits, a key in each lane, with a scale for each group of their columns.

For AVX2 and AVX-512, and heads of a multiple of 64 columns: so each half of a row has whole groups.
Eight or sixteen keys are transposed in registers: then their scales are a vector, and no sum goes
across lanes. `nibble_dot` multiplies them.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .compiling import fast, intrinsic
from .fixed_point import factor_of
from .int4_scales import set_scales
from .memory import get_int64
from .nibble_dot import Sums, nibbles
from .simd import (
    HAS_INT16_MADD,
    I32,
    I64,
    LANES,
    VECTOR,
    ZEROS,
    along,
    at,
    fetch,
    fused,
    i64,
    int64s_at,
    load,
    picks,
    spread,
    store,
)
from .softmax import AHEAD, CHUNK, ONE
from .unpack import GROUP, fetch_row
from .unpack_chunk import unpacked_rows

SIZE = 4 * LANES  # bytes of a vector
PIECE = 16  # bytes of a key that are transposed at once
STEP = 32 if LANES == 16 else AHEAD  # keys multiplied for one KV head before the next one's turn
SPREAD_FETCHES = LANES == 16  # among the products: 0.98 of a decode's time, but 1.02 with AVX2


def _of_quarters(*lanes):
    """Some lanes of each four of two vectors, counted in both."""
    both = [lane % 4 + lane // 4 * LANES for lane in lanes]
    return picks([four + lane for four in range(0, LANES, 4) for lane in both])


LOW_32, HIGH_32 = _of_quarters(0, 4, 1, 5), _of_quarters(2, 6, 3, 7)
LOW_64, HIGH_64 = _of_quarters(0, 1, 4, 5), _of_quarters(2, 3, 6, 7)


def _transposed(builder, keys, index):
    """PIECE bytes of each key from `index` on, four to a vector."""
    kind = ir.VectorType(I32, PIECE // 4)
    rows = [load(builder, at(builder, key, index, kind), 1) for key in keys]
    a, b, c, d = (_joined(builder, rows[k::4]) for k in range(4))
    pairs = [[builder.shuffle_vector(*p, w) for p in ((a, b), (c, d))] for w in (LOW_32, HIGH_32)]
    return [builder.shuffle_vector(*pair, w) for pair in pairs for w in (LOW_64, HIGH_64)]


def _joined(builder, parts):
    """Vectors one behind the other."""
    while len(parts) > 1:
        both = picks(range(2 * parts[0].type.count))
        neighbours = zip(parts[::2], parts[1::2], strict=True)
        parts = [builder.shuffle_vector(*pair, both) for pair in neighbours]
    return parts[0]


def _qk(rows):
    """Makes the products of `rows` queries and LANES keys."""

    @intrinsic
    def qk(typing, query, step, plane, offsets, scales, dim, scale, logits, width):
        """Logits of LANES keys, whose scales are as `set_scales` writes them.

        Rows of logits are `width` float32 apart, rows of queries `step` bytes.
        """

        def code(context, builder, signature, args):
            if HAS_INT16_MADD:
                _code(builder, rows, *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6, types.float32, *[types.intp] * 2), code

    return qk


def _code(builder, rows, query, step, plane, offsets, scales, dim, scale, logits, width):
    starts = [builder.add(query, builder.mul(step, i64(r))) for r in range(rows)]
    keys = [builder.add(plane, number) for number in int64s_at(builder, offsets, LANES)]
    places = [builder.inttoptr(start, I32.as_pointer()) for start in starts]
    totals = [cgutils.alloca_once_value(builder, ZEROS) for _ in starts]
    half = builder.lshr(dim, i64(1))

    def add(index):
        numbers_of = [nibbles(builder, bits) for bits in _bytes_of(builder, keys, index)]
        fetches = _fetches(builder, plane, offsets, index) if SPREAD_FETCHES else iter(())
        for start, numbers in zip((i64(0), half), zip(*numbers_of, strict=True), strict=True):
            column = builder.add(index, start)
            place = builder.add(scales, builder.mul(column, i64(SIZE // GROUP)))
            factor = load(builder, at(builder, place, i64(0), VECTOR), 4)
            products = _products(builder, places, dim, column, numbers, fetches)
            for number, total in zip(products, totals, strict=True):
                builder.store(fused(builder, number, factor, builder.load(total)), total)

    along(builder, GROUP, i64(0), half, add)
    for r, (start, total) in enumerate(zip(starts, totals, strict=True)):
        unit = spread(builder, builder.fmul(scale, factor_of(builder, start, dim)))
        row = builder.add(logits, builder.mul(width, i64(4 * r)))
        logit = builder.fmul(builder.load(total), unit)
        store(builder, logit, at(builder, row, i64(0), VECTOR), 4)


def _bytes_of(builder, keys, column):
    """A group's bytes of each key, four to a vector."""
    for start in range(0, GROUP, PIECE):
        yield from _transposed(builder, keys, builder.add(column, i64(start)))


def _fetches(builder, plane, offsets, index):
    """Fetches a group's bytes of the keys STEP later: a key's, each time it is asked for one."""
    for k in range(STEP, STEP + LANES):
        offset = load(builder, at(builder, offsets, i64(8 * k), I64), 8)
        yield fetch(builder, builder.add(plane, offset), index, 1)


def _products(builder, rows, dim, column, vectors, fetches):
    """Sums of the products of queries and a group of columns, from `column` on, of each key.

    With AVX-512 a fetch before each vector: many at once keep the loads behind them waiting.
    """
    sums = [Sums(builder, row, dim, column) for row in rows]
    for numbers in vectors:
        next(fetches, None)
        for of_row in sums:
            of_row.add(builder, numbers)
    return [builder.sitofp(of_row.total(builder), VECTOR) for of_row in sums]


qk_1, qk_2, qk_4 = map(_qk, (1, 2, 4))


@fast
def set_logits(args, queries, rows, plane, offsets, slots, head, count, scale, logits, room):
    """Logits `[rows, count]` of up to STEP keys, CHUNK apart; the next ones are fetched.

    `packed_room` has room for their scales. Not inlined: its caller's addresses would take the
    registers of the sums.
    """
    step, dim = args.row_bytes, args.head_dim
    scales = args.key_scales + 2 * head * (dim // GROUP)
    factors = unpacked_rows(room.key_scales)
    if not SPREAD_FETCHES:
        for k in range(count):
            fetch_row(plane + get_int64(offsets, k + STEP), dim // 2)
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

"""Sums of value rows, weighted for a few queries at a time."""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .bf16_dot import COUNT, are_pairs, as_pairs, counts
from .compiling import intrinsic
from .dtypes import pair_of, row_end, row_vector, widened, widened_counts
from .simd import (
    F32,
    I16,
    I32,
    I64,
    LANES,
    LINE,
    SPAN,
    VECTOR,
    add_pairs,
    along,
    as_bfloat16,
    at,
    fetch,
    fused,
    i64,
    load,
    picks,
    spread,
    store,
    vectors_of,
)


class Widened:
    """One value row at a time, widened, times weights of float32."""

    keys, count = 1, LANES

    def __init__(self, dtype):
        self.dtype = dtype

    def values(self, builder, take, rows, index, columns):
        """What `add` takes of columns of the rows, LANES of them in a vector."""
        most = min(columns, widened_counts(self.dtype)[0])
        starts = (builder.add(index, i64(start)) for start in range(0, columns, most))
        held = [widened(builder, take(rows[0], start, most), self.dtype) for start in starts]
        return [vector for numbers in held for vector in vectors_of(builder, numbers)]

    def weight(self, builder, weights, index):
        place = at(builder, weights, builder.mul(index, i64(4)), F32)
        return spread(builder, builder.load(place))

    def add(self, builder, total, weight, value):
        return fused(builder, weight, value, total)


class Pairs(Widened):
    """Two rows as bfloat16 at a time, times pairs of weights, rounded to bfloat16 too."""

    keys, count = 2, COUNT

    def values(self, builder, take, rows, index, columns):
        """The columns of two rows side by side."""
        most = min(columns, counts(self.dtype)[0])
        vectors = []
        for start in range(0, columns, most):
            here = builder.add(index, i64(start))
            halves = [as_pairs(builder, take(row, here, most), self.dtype) for row in rows]
            for pair in zip(*halves, strict=True):
                vectors += self.side_by_side(builder, *pair)
        return vectors

    def side_by_side(self, builder, a, b):
        halves = [range(start, start + LANES) for start in (0, LANES)]
        mixed = [[lane + row for lane in half for row in (0, COUNT)] for half in halves]
        return [builder.shuffle_vector(a, b, picks(lanes)) for lanes in mixed]

    def weight(self, builder, weights, index):
        pair = builder.load(at(builder, weights, builder.mul(index, i64(4)), I32))
        return builder.bitcast(spread(builder, pair), ir.VectorType(I16, 2 * LANES))

    def add(self, builder, total, weight, value):
        return add_pairs(builder, total, weight, value)


def way_of(query_dtype, dtype):
    return (Pairs if are_pairs(query_dtype, dtype) else Widened)(dtype)


def _pv(rows):
    """Makes the sums of value rows by the weights of `rows` queries."""

    @intrinsic
    def pv(
        typing, sums, step, plane, offsets, later, ahead, count, dim, weights, width, kept, dtypes
    ):
        """`sums[r] = sums[r] * kept[r] + weights[r] @ values`, of values at byte offsets.

        Weights are as `set_weights` leaves them; those past `count` are 0. The values of the plane
        `later` at the offsets `ahead`, as many, are fetched into the cache meanwhile.
        """

        def code(context, builder, signature, args):
            sums, step, plane, offsets, later, ahead, count, dim, weights, width, kept, _ = args
            query_dtype, number = pair_of(signature.args[-1])
            way, size = way_of(query_dtype, number), number.size
            turns = builder.udiv(builder.add(count, i64(way.keys - 1)), i64(way.keys))

            def add(index, columns, take):
                tile = [(r, v) for r in range(rows) for v in range(columns // LANES)]
                places, totals = {}, {}
                for r, v in tile:
                    start = builder.add(sums, builder.mul(step, i64(r)))
                    offset = builder.mul(builder.add(index, i64(v * LANES)), i64(4))
                    places[r, v] = at(builder, start, offset, VECTOR)
                    factor = builder.load(at(builder, kept, i64(4 * r), F32))
                    total = load(builder, places[r, v], 4)
                    total = builder.fmul(total, spread(builder, factor))
                    totals[r, v] = cgutils.alloca_once_value(builder, total)
                with cgutils.for_range(builder, turns) as loop:
                    starts = []
                    for key in range(way.keys):
                        turn = builder.mul(loop.index, i64(way.keys))
                        eight = builder.mul(builder.add(turn, i64(key)), i64(8))
                        row = builder.load(at(builder, offsets, eight, I64))
                        starts.append(builder.add(plane, row))
                        coming = builder.add(later, builder.load(at(builder, ahead, eight, I64)))
                        for start in range(0, columns, LINE // size):
                            fetch(builder, coming, builder.add(index, i64(start)), size)
                    values = way.values(builder, take, starts, index, columns)
                    for r in range(rows):
                        start = builder.add(weights, builder.mul(width, i64(4 * r)))
                        weight = way.weight(builder, start, loop.index)
                        for v, value in enumerate(values):
                            total = way.add(builder, builder.load(totals[r, v]), weight, value)
                            builder.store(total, totals[r, v])
                for place in tile:
                    store(builder, builder.load(totals[place]), places[place], 4)

            def whole(row, index, count):
                return row_vector(builder, row, index, number, count)

            def end(row, index, count):
                return row_end(builder, row, index, dim, number, count)

            many, few = SPAN * LANES, way.count
            stop = along(builder, many, i64(0), dim, lambda i: add(i, many, whole))
            stop = along(builder, few, stop, dim, lambda i: add(i, few, whole))
            with builder.if_then(builder.icmp_signed("<", stop, dim), likely=False):
                add(stop, few, end)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 11, dtypes), code

    return pv


pv_1, pv_2, pv_4 = map(_pv, (1, 2, 4))


@intrinsic
def set_weights(typing, weights, count, dtypes):
    """Turns a row of float32 weights, whole vectors, into what `pv_1` and its like take."""

    def code(context, builder, signature, args):
        weights, count, _ = args

        def narrow(index):
            place = builder.mul(index, i64(4))
            numbers = load(builder, at(builder, weights, place, VECTOR), 4)
            numbers = as_bfloat16(builder, numbers)
            place = at(builder, weights, builder.mul(index, i64(2)), numbers.type)
            store(builder, numbers, place, 2)

        if way_of(*pair_of(signature.args[-1])).keys > 1:
            along(builder, LANES, i64(0), count, narrow)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, dtypes), code

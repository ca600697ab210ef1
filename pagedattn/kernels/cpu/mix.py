"""Sums of value rows, weighted for a few queries at a time."""

from numba import types
from numba.core import cgutils

from .compiling import intrinsic
from .kinds import row_end, row_vector, size_of, widened
from .lanes import (
    FLOAT,
    LANES,
    SPAN,
    VECTOR,
    WORD,
    along,
    at,
    fetch,
    fused,
    load,
    spread,
    store,
    word,
)

LINE = 64  # bytes that are fetched at once


def _mix(rows):
    """Makes the sums of value rows by the weights of `rows` queries."""

    @intrinsic
    def mix(typing, sums, step, plane, offsets, ahead, count, dim, weights, width, kept, kind):
        """`sums[r] = sums[r] * kept[r] + weights[r] @ values`, of values at byte offsets."""

        def code(context, builder, signature, args):
            sums, step, plane, offsets, ahead, count, dim, weights, width, kept, _ = args
            number = signature.args[-1].dtype

            def add(index, span, take):
                tile = [(r, v) for r in range(rows) for v in range(span)]
                places, totals = {}, {}
                for r, v in tile:
                    start = builder.add(sums, builder.mul(step, word(r)))
                    offset = builder.mul(builder.add(index, word(v * LANES)), word(4))
                    places[r, v] = at(builder, start, offset, VECTOR)
                    factor = builder.load(at(builder, kept, word(4 * r), FLOAT))
                    total = load(builder, places[r, v], 4)
                    total = builder.fmul(total, spread(builder, factor))
                    totals[r, v] = cgutils.alloca_once_value(builder, total)
                with cgutils.for_range(builder, count) as loop:
                    eight = builder.mul(loop.index, word(8))
                    row = builder.add(plane, builder.load(at(builder, offsets, eight, WORD)))
                    later = builder.load(at(builder, ahead, eight, WORD))
                    size = size_of(number)
                    for start in range(0, span * LANES, LINE // size):
                        fetch(builder, later, builder.add(index, word(start)), size)
                    values = [take(row, builder.add(index, word(v * LANES))) for v in range(span)]
                    for r in range(rows):
                        start = builder.add(weights, builder.mul(width, word(4 * r)))
                        four = builder.mul(loop.index, word(4))
                        weight = spread(builder, builder.load(at(builder, start, four, FLOAT)))
                        for v in range(span):
                            total = builder.load(totals[r, v])
                            total = fused(builder, weight, values[v], total)
                            builder.store(total, totals[r, v])
                for place in tile:
                    store(builder, builder.load(totals[place]), places[place], 4)

            def whole(row, i):
                return widened(builder, row_vector(builder, row, i, number), number)

            def end(row, i):
                return widened(builder, row_end(builder, row, i, dim, number), number)

            stop = along(builder, SPAN * LANES, word(0), dim, lambda i: add(i, SPAN, whole))
            stop = along(builder, LANES, stop, dim, lambda i: add(i, 1, whole))
            with builder.if_then(builder.icmp_signed("<", stop, dim), likely=False):
                add(stop, 1, end)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 10, kind), code

    return mix


mix_1, mix_2, mix_4 = map(_mix, (1, 2, 4))

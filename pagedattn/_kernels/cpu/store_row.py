"""Whole rows of float32: their highest number, and the way out, rounded."""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .compiling import intrinsic
from .dtypes import narrowed, pair_of, put_end, put_vector
from .simd import I32, LANES, VECTOR, along, at, i64, load, picks, spread


@intrinsic
def narrow_row(typing, row, scale, out, dim, dtypes):
    """`out = row * scale`, rounded to even; a row has whole vectors of float32, `out` may not."""

    def code(context, builder, signature, args):
        row, scale, out, dim, _ = args
        number, factor = pair_of(signature.args[-1])[0], spread(builder, scale)

        def rounded(index):
            numbers = load(builder, at(builder, row, builder.mul(index, i64(4)), VECTOR), 4)
            return narrowed(builder, builder.fmul(numbers, factor), number)

        def put(index):
            put_vector(builder, out, index, rounded(index), number)

        stop = along(builder, LANES, i64(0), dim, put)
        with builder.if_then(builder.icmp_signed("<", stop, dim), likely=False):
            put_end(builder, out, stop, dim, rounded(stop), number)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32, types.intp, types.intp, dtypes), code


@intrinsic
def highest_of(typing, numbers, count):
    """The highest of some float32; `count` is a multiple of LANES."""

    def code(context, builder, signature, args):
        numbers, count = args
        least = ir.Constant(VECTOR, [-float("inf")] * LANES)
        tops = [cgutils.alloca_once_value(builder, least) for _ in range(4)]

        def take(tops):
            def take_at(index):
                for i, top in enumerate(tops):  # of which none waits for another
                    offset = builder.mul(builder.add(index, i64(LANES * i)), i64(4))
                    numbers_here = load(builder, at(builder, numbers, offset, VECTOR), 4)
                    builder.store(higher(builder, numbers_here, builder.load(top)), top)

            return take_at

        stop = along(builder, 4 * LANES, i64(0), count, take(tops))
        along(builder, LANES, stop, count, take(tops[:1]))
        pairs = [higher(builder, *map(builder.load, tops[i : i + 2])) for i in (0, 2)]
        return folded(builder, higher(builder, *pairs), higher)

    return types.float32(types.intp, types.intp), code


def higher(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def folded(builder, vector, join):
    """The lanes of a vector, joined two by two down to one number."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        halves = (
            builder.shuffle_vector(vector, vector, picks(range(start, start + lanes)))
            for start in (0, lanes)
        )
        vector = join(builder, *halves)
    return builder.extract_element(vector, I32(0))

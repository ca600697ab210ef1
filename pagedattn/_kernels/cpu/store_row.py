"""Whole rows of float32: their highest number, and the way out, rounded."""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .compiling import intrinsic
from .dtypes import narrowed, pair_of, put_end, put_vector
from .simd import LANES, VECTOR, along, at, load, picks, spread, word


@intrinsic
def narrow_row(typing, row, scale, out, dim, dtypes):
    """`out = row * scale`, rounded to even; a row has whole vectors of float32, `out` may not."""

    def code(context, builder, signature, args):
        row, scale, out, dim, _ = args
        number, factor = pair_of(signature.args[-1])[0], spread(builder, scale)

        def rounded(index):
            numbers = load(builder, at(builder, row, builder.mul(index, word(4)), VECTOR), 4)
            return narrowed(builder, builder.fmul(numbers, factor), number)

        def put(index):
            put_vector(builder, out, index, rounded(index), number)

        stop = along(builder, LANES, word(0), dim, put)
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
        top = cgutils.alloca_once_value(builder, least)

        def take(index):
            place = at(builder, numbers, builder.mul(index, word(4)), VECTOR)
            builder.store(higher(builder, load(builder, place, 4), builder.load(top)), top)

        along(builder, LANES, word(0), count, take)
        return folded(builder, builder.load(top), higher)

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
    return builder.extract_element(vector, ir.IntType(32)(0))

"""Sums of values of four bits, made bytes before, with a scale for each group of their columns.

For CPUs without AVX-512, and heads of a multiple of 64 columns: so each half of a row has whole
groups. Bytes of 16 times the numbers take a shift and two masks for each 64 of AVX2; what follows
are the sums of int8, of a group's columns at a time, by weights times its scales.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from .compiling import intrinsic, within
from .dtypes import INT8, row_vector, widened
from .int4_scales import set_value_scales
from .memory import get_int64
from .pv_int4 import set_weights
from .simd import (
    F32,
    I8,
    LANES,
    SPAN,
    VECTOR,
    along,
    at,
    fused,
    i64,
    load,
    spread,
    store,
)
from .softmax import CHUNK
from .unpack import GROUP, up_to
from .unpack_chunk import fetch_share, unpacked_rows

BYTES = ir.VectorType(I8, 4 * LANES)
UNIT = np.float32(1 / 16)  # of the bytes, for their scales


@intrinsic
def _set_bytes(typing, row, out, dim):
    """A row of four bits as bytes of 16 times its numbers."""

    def code(context, builder, signature, args):
        row, out, dim = args
        half = builder.lshr(dim, i64(1))

        def part(index):
            held = load(builder, at(builder, row, index, BYTES), 1)
            low = builder.shl(held, ir.Constant(BYTES, [4] * 4 * LANES))
            high = builder.and_(held, ir.Constant(BYTES, [-16] * 4 * LANES))
            store(builder, low, at(builder, out, index, BYTES), 4)
            store(builder, high, at(builder, out, builder.add(index, half), BYTES), 4)

        along(builder, 4 * LANES, i64(0), half, part)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), code


def _pv(rows):
    """Makes the sums of a group's columns by the weights of `rows` queries."""

    @intrinsic
    def pv(typing, sums, step, values, row_bytes, count, weights, kept):
        """`sums[r] = sums[r] * kept[r] + weights[r] @ values`, of rows of bytes."""

        def code(context, builder, signature, args):
            for start in range(0, GROUP, SPAN * LANES):
                _add_columns(builder, rows, start, *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), code

    return pv


def _add_columns(builder, rows, start, sums, step, values, row_bytes, count, weights, kept):
    tile = [(r, v) for r in range(rows) for v in range(SPAN)]
    lines = [builder.add(sums, builder.mul(step, i64(r))) for r in range(rows)]
    places = {(r, v): at(builder, lines[r], i64(4 * (start + v * LANES)), VECTOR) for r, v in tile}
    factors = [builder.load(at(builder, kept, i64(4 * r), F32)) for r in range(rows)]
    totals = {}
    for r, v in tile:
        total = builder.fmul(load(builder, places[r, v], 4), spread(builder, factors[r]))
        totals[r, v] = cgutils.alloca_once_value(builder, total)
    with cgutils.for_range(builder, count) as loop:
        row = builder.add(values, builder.mul(loop.index, row_bytes))
        held = [row_vector(builder, row, i64(start + v * LANES), INT8) for v in range(SPAN)]
        numbers = [widened(builder, bytes_, INT8) for bytes_ in held]
        four = builder.mul(loop.index, i64(4))
        for r in range(rows):
            place = at(builder, builder.add(weights, four), i64(4 * CHUNK * r), F32)
            weight = spread(builder, builder.load(place))
            for v, number in enumerate(numbers):
                total = builder.load(totals[r, v])
                builder.store(fused(builder, weight, number, total), totals[r, v])
    for place in tile:
        store(builder, builder.load(totals[place]), places[place], 4)


pv_1, pv_2, pv_4 = map(_pv, (1, 2, 4))


@within
def add_values(args, held, sums, plane, head, count, weights, coming, room):
    """`sums = sums * kept + weights @ values`, for the rows of a KV head.

    `packed_room` has room for the bytes, for their scales, and for weights of four rows.
    """
    step, dim, r = args.row_bytes, args.value_columns, 0
    values = unpacked_rows(room.key_scales)
    scales = values + CHUNK * dim
    own = scales + 4 * CHUNK * (dim // GROUP)
    for k in range(count):
        _set_bytes(plane + get_int64(room.values, k), values + k * dim, dim)
    set_value_scales(args, head, UNIT, room, scales)
    while r < room.rows:
        many = 4 if r + 4 <= room.rows else 2 if r + 2 <= room.rows else 1
        for first in range(0, args.value_dim, GROUP):
            factors = scales + 4 * CHUNK * (first // GROUP)
            if r == 0:
                groups = up_to(args.value_dim, GROUP) // GROUP
                fetch_share(coming, count, dim // 2, first // GROUP, groups)
            for i in range(many):
                row = weights + 4 * CHUNK * (r + i)
                set_weights(row, factors, own + 4 * CHUNK * i, held)
            columns, kept = sums + r * step + 4 * first, room.kept + 4 * r
            if many == 4:
                pv_4(columns, step, values + first, dim, count, own, kept)
            elif many == 2:
                pv_2(columns, step, values + first, dim, count, own, kept)
            else:
                pv_1(columns, step, values + first, dim, count, own, kept)
        r += many

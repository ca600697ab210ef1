"""Sums of values of four bits, as they are held, with a scale for each group of their columns.

For AVX-512, and heads of a multiple of 64 columns: so two vectors are one group of columns. A
value's scales multiply its weight, which so is another one for each group.
"""

import ml_dtypes
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from .bf16_dot import are_pairs
from .compiling import fast, intrinsic
from .dtypes import BFLOAT16, pair_of
from .int4_scales import set_value_scales
from .simd import (
    F32,
    HAS_BYTE_LOOK_UPS,
    I8,
    I16,
    I32,
    I32_VECTOR,
    I64,
    LANES,
    VECTOR,
    add_pairs,
    along,
    as_bfloat16,
    at,
    fused,
    i64,
    load,
    permuted,
    permuted_floats,
    picks,
    spread,
    spread_at,
    store,
)
from .softmax import CHUNK, ONE
from .unpack import GROUP, NUMBERS
from .unpack_chunk import fetch_share, unpacked_rows

AS_BFLOAT16 = np.array(NUMBERS, ml_dtypes.bfloat16).view(np.uint16).tolist()
VECTORS = 2  # of a group
SHORTS = ir.VectorType(I16, 2 * LANES)
BYTES = ir.VectorType(I8, GROUP)
# Each byte of two rows twice, to fill 16 bits; both rows' columns alternate, LANES at a time.
PAIRED = [
    picks([lane + row for lane in range(start, start + LANES) for row in (0, 0, GROUP, GROUP)])
    for start in range(0, GROUP, LANES)
]


class Widened:
    """One value at a time as float32, times weights of float32."""

    keys, size = 1, 4  # values at a time, and bytes of a weight

    def add(self, builder, total, weight, value):
        return fused(builder, weight, value, total)

    def parts(self, builder, rows, index):
        """What `add` takes of each half of the rows: VECTORS of columns."""
        pieces = [self._piece(builder, rows[0], index, v * LANES) for v in range(VECTORS)]
        return list(zip(*pieces, strict=True))

    def _piece(self, builder, row, index, start):
        place = builder.add(index, i64(start))
        held = load(builder, at(builder, row, place, ir.VectorType(I8, LANES)), 1)
        low = builder.zext(held, I32_VECTOR)
        high = builder.lshr(low, ir.Constant(I32_VECTOR, [4] * LANES))
        table = ir.Constant(VECTOR, [float(number) for number in NUMBERS])
        return [permuted_floats(builder, table, lanes) for lanes in (low, high)]

    def spread(self, builder, place):
        return builder.bitcast(spread(builder, builder.load(place)), VECTOR)

    def narrowed(self, builder, weights):
        return weights


class Pairs:
    """Two values at a time as pairs of bfloat16, times pairs of weights, rounded like them."""

    keys, size = 2, 2

    def add(self, builder, total, weight, value):
        return add_pairs(builder, total, weight, value)

    def parts(self, builder, rows, index):
        places = (at(builder, row, index, BYTES) for row in rows)
        held = [load(builder, place, 1) for place in places]
        pieces = [self._looked_up(builder, held, lanes) for lanes in PAIRED]
        return list(zip(*pieces, strict=True))

    def _looked_up(self, builder, held, lanes):
        """The lower five bits of each 16 count to an entry: the fifth is of no matter."""
        low = builder.bitcast(builder.shuffle_vector(*held, lanes), SHORTS)
        high = builder.lshr(low, ir.Constant(SHORTS, [4] * 2 * LANES))
        table = ir.Constant(SHORTS, AS_BFLOAT16 * 2)
        return [permuted(builder, table, bits) for bits in (low, high)]

    def spread(self, builder, place):
        return builder.bitcast(spread_at(builder, place), SHORTS)

    def narrowed(self, builder, weights):
        return as_bfloat16(builder, weights)


def way_of(held):
    as_pairs = HAS_BYTE_LOOK_UPS and are_pairs(held[0], BFLOAT16)
    return (Pairs if as_pairs else Widened)()


def _pv(rows):
    """Makes the sums of value rows by the weights of `rows` queries."""

    @intrinsic
    def pv(typing, sums, step, plane, offsets, count, dim, weights, kept, held):
        """`sums[r] = sums[r] * kept[r] + weights[r] @ values`, by weights of `set_weights`."""

        def code(context, builder, signature, args):
            sums, step, plane, offsets, count, dim, weights, kept, _ = args
            way = way_of(pair_of(signature.args[-1]))
            half = builder.lshr(dim, i64(1))
            turns = builder.udiv(builder.add(count, i64(way.keys - 1)), i64(way.keys))
            row_bytes = way.size * CHUNK

            def add(index):
                parts = index, builder.add(index, half)
                tile = [(r, p, v) for r in range(rows) for p in range(2) for v in range(VECTORS)]
                places, totals = {}, {}
                for r, p, v in tile:
                    column = builder.mul(builder.add(parts[p], i64(v * LANES)), i64(4))
                    start = builder.add(sums, builder.mul(step, i64(r)))
                    places[r, p, v] = at(builder, start, column, VECTOR)
                    factor = builder.load(at(builder, kept, i64(4 * r), F32))
                    total = load(builder, places[r, p, v], 4)
                    total = builder.fmul(total, spread(builder, factor))
                    totals[r, p, v] = cgutils.alloca_once_value(builder, total)
                groups = [builder.udiv(part, i64(GROUP)) for part in parts]
                own = [
                    at(builder, weights, builder.mul(group, i64(4 * row_bytes)), I32)
                    for group in groups
                ]
                with cgutils.for_range(builder, turns) as loop:
                    turn = builder.mul(loop.index, i64(8 * way.keys))
                    starts = []
                    for i in range(way.keys):
                        place = at(builder, offsets, builder.add(turn, i64(8 * i)), I64)
                        starts.append(builder.add(plane, builder.load(place)))
                    values = way.parts(builder, starts, index)
                    for r in range(rows):
                        for p in range(2):
                            place = builder.add(loop.index, i64(row_bytes // 4 * r))
                            weight = way.spread(builder, builder.gep(own[p], [place]))
                            for v in range(VECTORS):
                                total = builder.load(totals[r, p, v])
                                total = way.add(builder, total, weight, values[p][v])
                                builder.store(total, totals[r, p, v])
                for place in tile:
                    store(builder, builder.load(totals[place]), places[place], 4)

            along(builder, GROUP, i64(0), half, add)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8, held), code

    return pv


pv_1, pv_2, pv_4 = map(_pv, (1, 2, 4))


@intrinsic
def weight_bytes(typing, held):
    """Bytes of a weight, as `set_weights` writes it."""

    def code(context, builder, signature, args):
        return i64(way_of(pair_of(signature.args[0])).size)

    return types.intp(held), code


@intrinsic
def set_weights(typing, weights, factors, out, held):
    """A row of float32 weights of a chunk, times the scales of a group, as `pv_1` takes it."""

    def code(context, builder, signature, args):
        weights, factors, out, _ = args
        way = way_of(pair_of(signature.args[-1]))

        def narrow(index):
            four = builder.mul(index, i64(4))
            pair = [load(builder, at(builder, row, four, VECTOR), 4) for row in (weights, factors)]
            numbers = way.narrowed(builder, builder.fmul(*pair))
            place = at(builder, out, builder.mul(index, i64(way.size)), numbers.type)
            store(builder, numbers, place, way.size)

        along(builder, LANES, i64(0), i64(CHUNK), narrow)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, held), code


@fast
def add_values(args, held, sums, plane, head, count, weights, coming, room):
    """`sums = sums * kept + weights @ values`, for the rows of a KV head.

    Unpacked rows have room for the scales of each group, and behind them weights of four rows for
    each. Not inlined, for the reason that `qk_int4.set_logits` gives.
    """
    step, dim, scales = args.row_bytes, args.value_columns, unpacked_rows(room.key_scales)
    groups, r = dim // GROUP, 0
    own, size = scales + 4 * CHUNK * groups, weight_bytes(held) * CHUNK
    set_value_scales(args, head, ONE, room, scales)
    while r < room.rows:
        many = 4 if r + 4 <= room.rows else 2 if r + 2 <= room.rows else 1
        for group in range(groups):
            if r == 0:
                fetch_share(coming, count, dim // 2, group, groups)
            for i in range(many):
                out, row = own + size * (4 * group + i), weights + 4 * CHUNK * (r + i)
                set_weights(row, scales + 4 * CHUNK * group, out, held)
        at, factors = sums + r * step, room.kept + 4 * r
        if many == 4:
            pv_4(at, step, plane, room.values, count, dim, own, factors, held)
        elif many == 2:
            pv_2(at, step, plane, room.values, count, dim, own, factors, held)
        else:
            pv_1(at, step, plane, room.values, count, dim, own, factors, held)
        r += many

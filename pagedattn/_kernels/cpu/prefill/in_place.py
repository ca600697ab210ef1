"""Few rows times keys and values where they lie: what packing would cost is more than it saves.

Each number is summed up in the order of `micro_kernel`'s products of packed ones, so it has their
bits. A lies as there; keys and values are given by their addresses.
"""

from numba import types
from numba.core import cgutils

from ..bf16_dot import COUNT
from ..compiling import intrinsic
from ..dtypes import each, pair_of
from ..simd import F32, I32, I64, LANES, VECTOR, ZEROS, at, fetch, i64, load, spread, store
from .micro_kernel import SLAB, kernel_of, multiplied
from .packing import as_operand, side_by_side, transposed

AHEAD = 2 * LANES  # keys


def _left(builder, kernel, a, step):
    """The numbers or pairs of A's few rows at a step of a slab, each in all lanes."""
    number = I32 if kernel.pairs else F32
    places = (at(builder, a, i64(row * SLAB + 4 * step), number) for row in range(kernel.few))
    return [spread(builder, load(builder, place, 4)) for place in places]


def _totals(builder, firsts):
    return [cgutils.alloca_once_value(builder, first) for first in firsts]


def _add(builder, kernel, totals, left, right):
    for total, number in zip(totals, left, strict=True):
        builder.store(multiplied(builder, kernel, builder.load(total), number, right), total)


@intrinsic
def set_logits(typing, logits, row_bytes, queries, rows, later, dim, dtypes):
    """The products of few queries with LANES keys, whose addresses are at `rows`.

    As many rows as those of keys, whose addresses are at `later`, are fetched meanwhile.
    """

    def code(context, builder, signature, args):
        logits, row_bytes, queries, rows, later, dim, _ = args
        kernel, dtype = kernel_of(signature.args[-1]), pair_of(signature.args[-1])[1]
        ahead = builder.add(rows, i64(8 * AHEAD))
        sources, *fetched = (
            [builder.load(at(builder, base, i64(8 * i), I64)) for i in range(LANES)]
            for base in (rows, ahead, later)
        )
        totals = [cgutils.alloca_once(builder, VECTOR) for _ in range(kernel.few)]
        for total in totals:
            builder.store(ZEROS, total)

        def add(index, take):
            taken = [as_operand(builder, kernel, take(source), dtype) for source in sources]
            for source in (*fetched[0], *fetched[1]):
                fetch(builder, source, index, dtype.size)
            slab = builder.udiv(index, i64(kernel.depth))
            a = builder.add(queries, builder.mul(slab, i64(kernel.block * SLAB)))
            for step, column in enumerate(transposed(builder, taken)):
                right = builder.bitcast(column, VECTOR)
                _add(builder, kernel, totals, _left(builder, kernel, a, step), right)

        each(builder, dtype, dim, (kernel.depth,), add)
        for row, total in enumerate(totals):
            place = at(builder, logits, builder.mul(row_bytes, i64(row)), VECTOR)
            store(builder, builder.load(total), place, 4)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6, dtypes), code


@intrinsic
def add_values(typing, sums, row_bytes, weights, rows, later, count, dim, dtypes):
    """Adds values, whose addresses are at `rows`, weighted by few rows of A, to the sums.

    `count` of them, a multiple of LANES numbers or pairs. As many rows, whose addresses are at
    `later`, are fetched meanwhile.
    """

    def code(context, builder, signature, args):
        sums, row_bytes, weights, rows, later, count, dim, _ = args
        kernel, dtype = kernel_of(signature.args[-1]), pair_of(signature.args[-1])[1]
        width = COUNT if kernel.pairs else LANES
        many = 2 if kernel.pairs else 1
        vectors = width // LANES

        def columns(index, take):
            lines = [builder.add(sums, builder.mul(row_bytes, i64(r))) for r in range(kernel.few)]
            offset = builder.mul(index, i64(4))
            places = [
                [
                    at(builder, builder.add(line, offset), i64(4 * LANES * v), VECTOR)
                    for line in lines
                ]
                for v in range(vectors)
            ]
            totals = [_totals(builder, [load(builder, p, 4) for p in of]) for of in places]
            steps = i64(0), count, i64(many * LANES), I64
            with cgutils.for_range_slice(builder, *steps) as (key, _):
                slab = builder.udiv(key, i64(kernel.depth))
                a = builder.add(weights, builder.mul(slab, i64(kernel.block * SLAB)))
                for step in range(LANES):
                    place = builder.add(rows, builder.mul(key, i64(8)))
                    sources = [
                        builder.load(at(builder, place, i64(8 * (many * step + i)), I64))
                        for i in range(many)
                    ]
                    ahead = builder.add(later, builder.mul(key, i64(8)))
                    for i in range(many):
                        offset_of_row = i64(8 * (many * step + i))
                        source = builder.load(at(builder, ahead, offset_of_row, I64))
                        fetch(builder, source, index, dtype.size)
                    left = _left(builder, kernel, a, step)
                    right = side_by_side(builder, kernel, [take(x) for x in sources], dtype)
                    for of, vector in zip(totals, right, strict=True):
                        _add(builder, kernel, of, left, builder.bitcast(vector, VECTOR))
            for of, at_places in zip(totals, places, strict=True):
                for total, place in zip(of, at_places, strict=True):
                    store(builder, builder.load(total), place, 4)

        each(builder, dtype, dim, (width,), columns)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 7, dtypes), code

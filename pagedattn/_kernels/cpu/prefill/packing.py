"""Queries as rows of A; keys and values as columns of B: `micro_kernel` says how these lie.

Rows are given by their addresses, and end with zeros where head_dim is no multiple of a slab.
"""

from numba import types

from ..bf16_dot import COUNT, as_pairs
from ..compiling import intrinsic
from ..dtypes import each, pair_of, widened
from ..simd import I32_VECTOR, I64, LANES, at, i64, picks, store
from .micro_kernel import LINE, PANEL, SLAB, kernel_of


def as_operand(builder, kernel, numbers, dtype):
    """A slab's worth of numbers of a row as A and B hold them: LANES of float32, or of pairs."""
    if not kernel.pairs:
        return widened(builder, numbers, dtype)
    (pairs,) = as_pairs(builder, numbers, dtype)
    return builder.bitcast(pairs, I32_VECTOR)


@intrinsic
def pack_query(typing, source, row, dim, dtypes):
    """A row of queries as a row of A."""

    def code(context, builder, signature, args):
        source, row, dim, _ = args
        kernel, dtype = kernel_of(signature.args[-1]), pair_of(signature.args[-1])[0]

        def put(index, take):
            slab = builder.udiv(index, i64(kernel.depth))
            place = builder.mul(slab, i64(kernel.block * SLAB))
            numbers = as_operand(builder, kernel, take(source), dtype)
            store(builder, numbers, at(builder, row, place, numbers.type), 4)

        each(builder, dtype, dim, (kernel.depth,), put)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, dtypes), code


@intrinsic
def pack_keys(typing, rows, panels, dim, dtypes):
    """LANES keys, whose addresses are at `rows`, as columns that lie side by side in a panel."""

    def code(context, builder, signature, args):
        rows, panels, dim, _ = args
        kernel, dtype = kernel_of(signature.args[-1]), pair_of(signature.args[-1])[1]
        sources = [builder.load(at(builder, rows, i64(8 * i), I64)) for i in range(LANES)]

        def put(index, take):
            taken = [as_operand(builder, kernel, take(source), dtype) for source in sources]
            slab = builder.udiv(index, i64(kernel.depth))
            place = builder.add(panels, builder.mul(slab, i64(LANES * LINE)))
            for i, column in enumerate(transposed(builder, taken)):
                store(builder, column, at(builder, place, i64(LINE * i), column.type), 4)

        each(builder, dtype, dim, (kernel.depth,), put)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, dtypes), code


@intrinsic
def pack_values(typing, rows, panels, panel_bytes, dim, dtypes):
    """A value, or two, whose addresses are at `rows`, as a row of all panels."""

    def code(context, builder, signature, args):
        rows, panels, panel_bytes, dim, _ = args
        kernel, dtype = kernel_of(signature.args[-1]), pair_of(signature.args[-1])[1]
        count = COUNT if kernel.pairs else LANES
        many = 2 if kernel.pairs else 1
        sources = [builder.load(at(builder, rows, i64(8 * i), I64)) for i in range(many)]

        def put(index, take):
            panel = builder.mul(builder.udiv(index, i64(PANEL)), panel_bytes)
            within = builder.mul(builder.urem(index, i64(PANEL)), i64(4))
            place = builder.add(panels, builder.add(panel, within))
            columns = side_by_side(builder, kernel, [take(source) for source in sources], dtype)
            for i, vector in enumerate(columns):
                here = builder.add(place, builder.mul(panel_bytes, i64(i)))
                store(builder, vector, at(builder, here, i64(0), vector.type), 4)

        each(builder, dtype, dim, (count,), put)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4, dtypes), code


def side_by_side(builder, kernel, rows, dtype):
    """A row of B, of LANES columns a vector: of one row of numbers, or pairs of two rows'."""
    if not kernel.pairs:
        return [widened(builder, rows[0], dtype)]
    first, second = (as_pairs(builder, numbers, dtype)[0] for numbers in rows)
    halves = [range(start, start + PANEL) for start in (0, PANEL)]
    mixed = [[lane + row for lane in half for row in (0, COUNT)] for half in halves]
    return [builder.shuffle_vector(first, second, picks(lanes)) for lanes in mixed]


def transposed(builder, rows):
    """LANES vectors as a matrix: each step mixes rows that lie `half` apart."""
    half = LANES // 2
    while half:
        mixed = list(rows)
        for low in range(LANES):
            if not low & half:
                pair = rows[low], rows[low + half]
                for target, start in ((low, 0), (low + half, half)):
                    lanes = [
                        (lane & ~half) + start + (LANES if lane & half else 0)
                        for lane in range(LANES)
                    ]
                    mixed[target] = builder.shuffle_vector(*pair, picks(lanes))
        rows, half = mixed, half // 2
    return rows

"""From a row of logits to a row of weights, of A's layout, and their sum.

2 ** x by Cody and Waite's split (1980): x = n + r with whole n and 0 <= r < 1, and 2 ** r by a
polynomial that is 1 at 0, fitted to the least largest error: 1.8e-7 of its value with five terms,
3e-6 with four.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ..compiling import intrinsic
from ..simd import (
    I16,
    I32,
    LANES,
    VECTOR,
    ZEROS,
    along,
    as_bfloat16_pair,
    at,
    fused,
    i64,
    load,
    spread,
    store,
)
from ..store_row import folded, higher
from .micro_kernel import SLAB, kernel_of

LOG2_E = 1.4426950408889634
LEAST = -127.0  # without AVX-512, 2 ** x is taken for 0 from here down
# Of r ** 5 to r, and of r ** 4 to r: for weights that are rounded to bfloat16.
FIVE = 1.8705351e-3, 9.011453e-3, 5.5801757e-2, 0.24016487, 0.69315124
FOUR = 1.3426862e-2, 5.2242193e-2, 0.2412803, 0.69304485
TOWARDS_LESS = 9  # how AVX-512 rounds, without a signal: what is left of a number is not negative


def _in_order(builder, total, number):
    """A sum that LLVM does not join with others in another order, as Numba's flags allow it."""
    return builder.fadd(total, number, flags=["nsz"])


def _constant(number):
    return ir.Constant(VECTOR, [number] * LANES)


def _exp2(builder, x, terms):
    """2 ** x for x <= 100, to 0 at -inf; NaN stays NaN."""
    if LANES < 16:
        is_small = builder.fcmp_ordered("<", x, _constant(LEAST))
        x = builder.select(is_small, _constant(LEAST), x)
        n = _of_vector(builder, f"floor.v{LANES}f32", x)
        return _times_power(builder, _power(builder, builder.fsub(x, n), terms), n)
    r = _masked(builder, "reduce", x, I32(TOWARDS_LESS))  # 0 of -inf
    return _masked(builder, "scalef", _power(builder, r, terms), x)


def _power(builder, r, terms):
    found = _constant(terms[0])
    for term in (*terms[1:], 1.0):
        found = fused(builder, found, r, _constant(term))
    return found


def _times_power(builder, numbers, n):
    """Numbers times 2 ** n for whole n, 0 at LEAST."""
    words = ir.VectorType(I32, LANES)
    power = builder.add(builder.fptosi(n, words), ir.Constant(words, [127] * LANES))
    power = builder.bitcast(builder.shl(power, ir.Constant(words, [23] * LANES)), VECTOR)
    return builder.fmul(numbers, power)


def _of_vector(builder, name, x):
    kind = ir.FunctionType(VECTOR, [VECTOR])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}"), [x])


def _masked(builder, name, *operands):
    """An instruction of AVX-512 for all lanes: `scalef(a, b)` is a * 2 ** floor(b)."""
    every, current = I16(0xFFFF), I32(4)  # lanes; the rounding that is set
    operands = (*operands, ZEROS, every, current)
    kind = ir.FunctionType(VECTOR, [operand.type for operand in operands])
    name = f"llvm.x86.avx512.mask.{name}.ps.512"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), operands)


@intrinsic
def set_weights(typing, logits, weights, count, top, limit, factor, totals, dtypes):
    """`weights = 2 ** ((logits - top) * factor)`, a row of A; adds them up in `totals`, by lanes.

    Gives whether that is done: not where a logit is above the limit. `count` is a multiple of two
    vectors.
    """

    def code(context, builder, signature, args):
        logits, weights, count, top, limit, factor, totals, _ = args
        kernel = kernel_of(signature.args[-1])
        terms = FOUR if kernel.pairs else FIVE
        top, limit, factor = (spread(builder, number) for number in (top, limit, factor))
        sums = at(builder, totals, i64(0), VECTOR)
        total = cgutils.alloca_once_value(builder, load(builder, sums, 4))
        highest = cgutils.alloca_once_value(builder, _constant(-float("inf")))

        def weigh(index):
            place = builder.add(logits, builder.mul(index, i64(4)))
            found = []
            for part in range(2):
                x = load(builder, at(builder, place, i64(4 * LANES * part), VECTOR), 4)
                builder.store(higher(builder, x, builder.load(highest)), highest)
                x = builder.fmul(builder.fsub(x, top), factor)
                found.append(_exp2(builder, x, terms))
                builder.store(_in_order(builder, builder.load(total), found[-1]), total)
            _put(builder, kernel, weights, index, found)

        along(builder, 2 * LANES, i64(0), count, weigh)
        lanes = ir.IntType(LANES)
        above = builder.fcmp_ordered(">", builder.load(highest), limit)
        is_done = builder.icmp_unsigned("==", builder.bitcast(above, lanes), lanes(0))
        with builder.if_then(is_done, likely=True):
            store(builder, builder.load(total), sums, 4)
        return is_done

    numbers = [types.intp] * 3 + [types.float32] * 3 + [types.intp]
    return types.boolean(*numbers, dtypes), code


def _put(builder, kernel, weights, index, two):
    """Two vectors as a slab of bfloat16, or as two of float32."""
    slab = builder.mul(builder.udiv(index, i64(kernel.depth)), i64(kernel.block * SLAB))
    place = builder.add(weights, slab)
    if kernel.pairs:
        both = as_bfloat16_pair(builder, *two)
        store(builder, both, at(builder, place, i64(0), both.type), 4)
        return
    for part, vector in enumerate(two):
        here = builder.add(place, i64(kernel.block * SLAB * part))
        store(builder, vector, at(builder, here, i64(0), VECTOR), 4)


@intrinsic
def scale_row(typing, row, factor, count):
    """A row of `count` float32, a multiple of LANES, times a factor."""

    def code(context, builder, signature, args):
        row, factor, count = args
        factor = spread(builder, factor)

        def scale(index):
            place = at(builder, row, builder.mul(index, i64(4)), VECTOR)
            store(builder, builder.fmul(load(builder, place, 4), factor), place, 4)

        along(builder, LANES, i64(0), count, scale)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32, types.intp), code


@intrinsic
def join_row(typing, kept, row, count, top, kept_top, row_top, factor):
    """`kept = kept * 2 ** ((kept_top - top) * factor) + row * 2 ** ((row_top - top) * factor)`.

    Of `count` float32, a multiple of LANES. The bits follow from the numbers alone, wherever this
    is compiled into.
    """

    def code(context, builder, signature, args):
        kept, row, count, *numbers = args
        top, kept_top, row_top, factor = (spread(builder, number) for number in numbers)
        scales = []
        for of in (kept_top, row_top):
            apart = builder.fsub(of, top, flags=["nsz"])
            apart = builder.fmul(apart, factor, flags=["nsz"])
            scales.append(_exp2(builder, apart, FIVE))

        def join(index):
            offset = builder.mul(index, i64(4))
            place, other = (at(builder, base, offset, VECTOR) for base in (kept, row))
            scaled = builder.fmul(load(builder, place, 4), scales[0], flags=["nsz"])
            store(builder, fused(builder, load(builder, other, 4), scales[1], scaled), place, 4)

        along(builder, LANES, i64(0), count, join)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3, *[types.float32] * 4), code


@intrinsic
def total_of(typing, totals):
    """The sum of LANES float32."""

    def code(context, builder, signature, args):
        vector = load(builder, at(builder, args[0], i64(0), VECTOR), 4)
        return folded(builder, vector, lambda builder, a, b: builder.fadd(a, b))

    return types.float32(types.intp), code

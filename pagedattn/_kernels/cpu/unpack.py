"""Rows of quantised caches with per-token scales, as rows of the query's dtype.

Prompts multiply such rows. Short queries read eight bits in the cache itself: a key's scale is a
factor on its logits, a value's one on its weight. Four bits they read so in heads of a multiple of
COLUMNS; keys only where `are_int16`.
"""

import numpy as np
from llvmlite import ir
from numba import types

from ...cache.packing import GROUP
from . import float16
from .compiling import fast, intrinsic, within
from .dtypes import (
    BFLOAT16,
    INT4,
    INT8,
    TOKENS,
    each,
    narrowed,
    pair_of,
    put_end,
    put_vector,
    widened,
)
from .fixed_point import are_int16
from .memory import get_float32, put_float32
from .simd import (
    F16,
    F32,
    HAS_BYTE_LOOK_UPS,
    I8,
    I16,
    I32,
    LANES,
    LINE,
    VECTOR,
    along,
    as_bfloat16,
    at,
    fetch,
    i64,
    load,
    permuted,
    picks,
    spread,
    store,
)

NUMBERS = [*range(8), *range(-8, 0)]  # in the order of their four bits


def fact(of):
    """A fact of the dtypes, known when the caller is compiled."""

    @intrinsic
    def known(typing, held):
        def code(context, builder, signature, args):
            return ir.Constant(ir.IntType(1), int(of(pair_of(signature.args[0]))))

        return types.boolean(held), code

    return known


# Whether one scale a token multiplies logits and weights: with eight bits, not with int4.
scales_logits = fact(lambda held: held[-1] == TOKENS and held[1] != INT4)
looks_up = fact(lambda held: HAS_BYTE_LOOK_UPS and held[:2] == [BFLOAT16, INT4])
COLUMNS = 2 * GROUP  # in which both halves of a row have whole groups
has_int4_dot = fact(lambda held: held[1] == INT4 and are_int16(*held[:2]))
by_token = fact(lambda held: held[-1] == TOKENS)
is_packed = fact(lambda held: held[1] == INT4)


@fast
def up_to(number, step):
    """The least multiple of a step that is not below a number."""
    return -(-number // step) * step


@fast
def group_of(dim):
    group = np.int64(GROUP)
    while dim % group != 0:
        group //= 2
    return group


@within
def multiplies_int4_keys(args, held):
    """Whether short queries, as `Int16Bytes`, multiply keys of four bits as they are held."""
    return has_int4_dot(held) and args.head_dim % COLUMNS == 0


@within
def unpack_row(source, scales, index, out, dim, itemsize, held):
    """The row of a cache whose scales are the `index`th, times these, as a row of the query."""
    if looks_up(held) and dim % COLUMNS == 0:
        look_up_int4(source, scales + 2 * index * (dim // GROUP), out, dim, held)
    elif is_packed(held):
        half, group, start = dim // 2, group_of(dim), np.int64(0)
        scales += 2 * index * (dim // group)
        while start < dim:
            within_half = start % half
            count = min(group - start % group, half - within_half)
            shift = np.int32(28 - 4 * (start // half))
            scale, target = scales + 2 * (start // group), out + start * itemsize
            unpack_int4(source + within_half, shift, scale, target, count, held)
            start += count
    else:
        unpack_eight(source, get_float32(scales, index), out, dim, held)


def _put(builder, numbers, factor, out, index, end, dtype):
    """Writes float32 times a factor: a whole vector, or up to `end`."""
    numbers = narrowed(builder, builder.fmul(numbers, factor), dtype)
    if end is None:
        put_vector(builder, out, index, numbers, dtype)
    else:
        put_end(builder, out, index, end, numbers, dtype)


@intrinsic
def unpack_eight(typing, source, scale, out, dim, held):
    """A row of eight bits times a scale; but for their factor in `UNITS`."""

    def code(context, builder, signature, args):
        source, scale, out, dim, _ = args
        query, cache, *_ = pair_of(signature.args[-1])
        factor = spread(builder, scale)

        def put(index, take):
            numbers = widened(builder, take(source), cache)
            # The rows lie so far apart that a whole vector at their end has room.
            _put(builder, numbers, factor, out, index, None, query)

        each(builder, cache, dim, (LANES,), put)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32, types.intp, types.intp, held), code


@intrinsic
def unpack_int4(typing, source, shift, scale, out, count, held):
    """Numbers of a group, in the low or the high bits of bytes, times its float16 scale.

    `shift` brings them to the top of 32 bits: 28, or 24.
    """

    def code(context, builder, signature, args):
        source, shift, scale, out, count, _ = args
        query, words = pair_of(signature.args[-1])[0], ir.VectorType(I32, LANES)
        half = builder.load(at(builder, scale, i64(0), F16))
        factor = float16.widened(builder, spread(builder, half))
        up, down = spread(builder, shift), ir.Constant(words, [28] * LANES)

        def widened_four(take):
            bits = builder.shl(builder.zext(take(source), words), up)
            return builder.sitofp(builder.ashr(bits, down), ir.VectorType(F32, LANES))

        def put(index, take):
            whole = builder.icmp_signed("<=", builder.add(index, i64(LANES)), count)
            numbers = widened_four(take)
            with builder.if_else(whole, likely=True) as (then, otherwise):
                with then:
                    _put(builder, numbers, factor, out, index, None, query)
                with otherwise:
                    _put(builder, numbers, factor, out, index, count, query)

        each(builder, INT8, count, (LANES,), put)
        return context.get_dummy_value()

    return types.void(types.intp, types.int32, types.intp, types.intp, types.intp, held), code


@intrinsic
def look_up_int4(typing, source, scales, out, dim, held):
    """`unpack_int4` for rows of whole groups of 32 in each half, as bfloat16.

    The 16 numbers of four bits times the scale of a group are a table in half a register; that of
    the group in the high bits is the other half.
    """

    def code(context, builder, signature, args):
        if not HAS_BYTE_LOOK_UPS:
            return context.get_dummy_value()
        source, scales, out, dim, _ = args
        half = builder.lshr(dim, i64(1))
        words = ir.VectorType(I16, 2 * LANES)
        numbers = ir.Constant(VECTOR, [float(number) for number in NUMBERS])

        def table(group):
            place = builder.add(scales, builder.mul(group, i64(2)))
            scale = builder.load(at(builder, place, i64(0), F16))
            factor = float16.widened(builder, spread(builder, scale))
            numbers_ = as_bfloat16(builder, builder.fmul(numbers, factor))
            return builder.bitcast(numbers_, ir.VectorType(I16, LANES))

        def body(index):
            group = builder.udiv(index, i64(GROUP))
            others = builder.add(group, builder.udiv(half, i64(GROUP)))
            both = builder.shuffle_vector(table(group), table(others), picks(range(2 * LANES)))
            bytes_ = ir.VectorType(I8, 2 * LANES)
            bits = builder.zext(load(builder, at(builder, source, index, bytes_), 1), words)
            low = builder.and_(bits, ir.Constant(words, [15] * 2 * LANES))
            high = builder.lshr(bits, ir.Constant(words, [4] * 2 * LANES))
            high = builder.or_(high, ir.Constant(words, [16] * 2 * LANES))
            for lanes, column in ((low, index), (high, builder.add(index, half))):
                found = permuted(builder, both, lanes)
                place = at(builder, out, builder.mul(column, i64(2)), words)
                store(builder, found, place, 2)

        along(builder, GROUP, i64(0), half, body)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp, held), code


@intrinsic
def fetch_row(typing, row, count):
    """Asks for the cache lines of some bytes; most rows are no longer than the first."""

    def code(context, builder, signature, args):
        row, count = args
        whole = builder.add(count, i64(LINE - 1))
        fetch(builder, row, i64(0), 1)
        with builder.if_then(builder.icmp_signed(">", count, i64(LINE)), likely=False):
            along(builder, LINE, i64(LINE), whole, lambda index: fetch(builder, row, index, 1))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), code


@fast
def scale_logits(logits, factors, count):
    """Logits of a row times the scales of their keys."""
    for k in range(count):
        put_float32(logits, k, get_float32(logits, k) * get_float32(factors, k))

"""The scales of keys and values of four bits, as rows of float32 for each group of columns."""

from llvmlite import ir
from numba import types

from . import float16
from .compiling import fast, intrinsic
from .memory import get_float32, get_int32, get_int64, put_int32
from .simd import INTEGERS, LANES, VECTOR, along, at, int64s_at, load, picks, spread, store, word
from .softmax import CHUNK, NONE
from .unpack import GROUP


@intrinsic
def _widen_pairs(typing, first, second, unit):
    """Pairs of float16 of a chunk as two rows of float32 times a unit; the first replaces them."""

    def code(context, builder, signature, args):
        *rows, unit = args
        unit = spread(builder, unit)

        def widen(index):
            four = builder.mul(index, word(4))
            pairs = load(builder, at(builder, rows[0], four, INTEGERS), 4)
            for row, by in zip(rows, (0, 16), strict=True):
                halves = builder.lshr(pairs, ir.Constant(INTEGERS, [by] * LANES))
                halves = builder.trunc(halves, ir.VectorType(ir.IntType(16), LANES))
                halves = builder.bitcast(halves, ir.VectorType(ir.HalfType(), LANES))
                numbers = builder.fmul(float16.widened(builder, halves), unit)
                store(builder, numbers, at(builder, row, four, VECTOR), 4)

        along(builder, LANES, word(0), word(CHUNK), widen)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.float32), code


@intrinsic
def set_key_scales(typing, scales, slots, dim, out):
    """The scales of LANES keys as float32, `[groups, LANES]`."""

    def code(context, builder, signature, args):
        scales, slots, dim, out = args
        groups = builder.udiv(dim, word(GROUP))
        row_bytes = builder.mul(groups, word(2))
        places = [builder.mul(slot, row_bytes) for slot in int64s_at(builder, slots, LANES)]
        rows = [builder.add(scales, place) for place in places]

        def widen(group):
            both = ir.Constant(INTEGERS, ir.Undefined)
            for lane, row in enumerate(rows):
                place = at(builder, row, builder.mul(group, word(2)), ir.IntType(32))
                both = builder.insert_element(both, load(builder, place, 2), ir.IntType(32)(lane))
            halves = builder.bitcast(both, ir.VectorType(ir.HalfType(), 2 * LANES))
            for g in range(2):
                lanes = picks(range(g, 2 * LANES, 2))
                numbers = float16.widened(builder, builder.shuffle_vector(halves, halves, lanes))
                place = builder.mul(builder.add(group, word(g)), word(4 * LANES))
                store(builder, numbers, at(builder, out, place, VECTOR), 4)

        along(builder, 2, word(0), groups, widen)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), code


@fast
def set_value_scales(args, head, unit, room, out):
    """Those of a head's values times a unit, `[groups, CHUNK]`.

    0 where no row sees a value: it may be NaN.
    """
    groups = args.value_columns // GROUP
    scales = args.value_scales + 2 * head * groups
    for group in range(0, groups, 2):
        row = out + 4 * CHUNK * group
        for k in range(CHUNK):
            pair = get_int32(scales + 2 * groups * get_int64(room.slots, k), group // 2)
            hidden = args.bias != 0 and get_float32(room.shown, k) == NONE
            put_int32(row, k, 0 if hidden else pair)
        _widen_pairs(row, row + 4 * CHUNK, unit)

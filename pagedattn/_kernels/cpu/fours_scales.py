"""The scales of a chunk's values of four bits."""

from llvmlite import ir
from numba import types

from . import float16
from .compiling import fast, intrinsic
from .memory import get_float32, get_int32, get_int64, put_int32
from .simd import INTEGERS, LANES, VECTOR, along, at, load, store, word
from .softmax import CHUNK, NONE
from .unpack import GROUP

# Of a scale: without AVX-512's tables, the kernel's integers are 16 times the numbers.
UNIT = 1.0 if LANES == 16 else 1 / 16


@intrinsic
def _part(typing, row, other):
    """Pairs of float16 of a chunk as two rows of float32 times UNIT; the first replaces them."""

    def code(context, builder, signature, args):
        def part(index):
            four = builder.mul(index, word(4))
            pairs = load(builder, at(builder, args[0], four, INTEGERS), 4)
            for row, by in zip(args, (0, 16), strict=True):
                halves = builder.lshr(pairs, ir.Constant(INTEGERS, [by] * LANES))
                halves = builder.trunc(halves, ir.VectorType(ir.IntType(16), LANES))
                halves = builder.bitcast(halves, ir.VectorType(ir.HalfType(), LANES))
                numbers = builder.fmul(float16.widened(builder, halves), _every(UNIT))
                store(builder, numbers, at(builder, row, four, VECTOR), 4)

        along(builder, LANES, word(0), word(CHUNK), part)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), code


def _every(number):
    return ir.Constant(VECTOR, [number] * LANES)


@fast
def set_scales(args, head, room, out):
    """Those of a head's values, `[groups, CHUNK]`; 0 where no row sees a value: it may be NaN."""
    groups = args.value_columns // GROUP
    scales = args.value_scales + 2 * head * groups
    for group in range(0, groups, 2):
        row = out + 4 * CHUNK * group
        for k in range(CHUNK):
            pair = get_int32(scales + 2 * groups * get_int64(room.slots, k), group // 2)
            hidden = args.bias != 0 and get_float32(room.shown, k) == NONE
            put_int32(row, k, 0 if hidden else pair)
        _part(row, row + 4 * CHUNK)

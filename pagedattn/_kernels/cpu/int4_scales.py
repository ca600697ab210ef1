"""The scales of keys and values of four bits, as rows of float32 for each group of columns."""

from typing import NamedTuple

from llvmlite import ir
from numba import types

from . import float16
from .chunk import clear_hidden
from .compiling import intrinsic, within
from .simd import (
    F16,
    I32,
    I64,
    LANES,
    VECTOR,
    along,
    at,
    i64,
    int64s_at,
    load,
    picks,
    spread,
    store,
)
from .softmax import CHUNK
from .unpack import GROUP

FLOAT16S = ir.VectorType(F16, 2 * LANES)


class GroupsAtOnce(NamedTuple):
    """Neighbouring groups whose float16 scales are loaded as one integer."""

    groups: int
    integer: ir.IntType

    @property
    def tokens(self) -> int:
        """How many tokens' integers fill one vector of float16."""
        return 2 * LANES // self.groups


FOUR, TWO = GroupsAtOnce(4, I64), GroupsAtOnce(2, I32)


@intrinsic
def set_scales(typing, scales, slots, dim, unit, out, step):
    """Scales of LANES slots, float16 in the cache, times `unit`: float32 `[groups, LANES]`.

    Rows of `out` are `step` bytes apart. `slots` count tokens and KV heads: `slot * num_kv_heads`.
    `dim` has a multiple of two groups: heads are a multiple of 64 columns.
    """

    def code(context, builder, signature, args):
        scales, slots, dim, unit, out, step = args
        groups = builder.udiv(dim, i64(GROUP))
        row_bytes = builder.mul(groups, i64(2))
        unit = spread(builder, unit)

        def widen(some, group):
            first = builder.add(scales, builder.mul(group, i64(2)))
            rows = (
                builder.add(first, builder.mul(slot, row_bytes))
                for slot in int64s_at(builder, slots, LANES)
            )
            for g, halves in enumerate(_by_groups(builder, rows, some)):
                numbers = builder.fmul(float16.widened(builder, halves), unit)
                place = builder.mul(builder.add(group, i64(g)), step)
                store(builder, numbers, at(builder, out, place, VECTOR), 4)

        done = along(builder, 4, i64(0), groups, lambda group: widen(FOUR, group))
        along(builder, 2, done, groups, lambda group: widen(TWO, group))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3, types.float32, *[types.intp] * 2), code


def _by_groups(builder, rows, some):
    """The float16 of some groups, which begin at these addresses: of all rows, group by group."""
    numbers = [load(builder, at(builder, row, i64(0), some.integer), 2) for row in rows]
    starts = range(0, LANES, some.tokens)
    vectors = [_side_by_side(builder, numbers[s : s + some.tokens]) for s in starts]
    for g in range(some.groups):
        lanes = picks(range(g, some.groups * LANES, some.groups))
        yield builder.shuffle_vector(vectors[0], vectors[-1], lanes)


def _side_by_side(builder, integers):
    """Integers as a vector of the float16 in them."""
    found = ir.Constant(ir.VectorType(integers[0].type, len(integers)), ir.Undefined)
    for lane, number in enumerate(integers):
        found = builder.insert_element(found, number, I32(lane))
    return builder.bitcast(found, FLOAT16S)


@within
def set_value_scales(args, head, unit, room, out):
    """Those of a head's values times a unit, `[groups, CHUNK]`.

    0 where no row sees a value: it may be NaN.
    """
    groups = args.value_columns // GROUP
    scales = args.value_scales + 2 * head * groups
    for k in range(0, CHUNK, LANES):
        set_scales(scales, room.slots + 8 * k, args.value_columns, unit, out + 4 * k, 4 * CHUNK)
    if args.bias != 0:
        for group in range(groups):
            clear_hidden(out + 4 * CHUNK * group, room.shown)

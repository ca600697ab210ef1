"""Products of queries and numbers of four bits, as x86 multiplies bytes: unsigned ones by signed.

A number plus 8 is unsigned. Of a query's 16 bits the upper byte and the lower one, both signed, are
multiplied apart, four columns at a time, and eight times the sum of the queries is taken off again.
So a row of queries is bytes `[dim // 4, 2, 4]`, and behind them an int32 for each group of columns.
"""

from llvmlite import ir

from ...cache.packing import GROUP
from .fixed_point import COUNT
from .simd import (
    HAS_VNNI,
    I8,
    I16,
    I32,
    I32_VECTOR,
    I32_ZEROS,
    add_byte_pairs,
    add_bytes,
    add_int16_pairs,
    along,
    at,
    i64,
    load,
    picks,
    spread,
    store,
)
from .store_row import folded

# The largest query: 32640 and above would need an upper byte of 128, which int8 lacks. The greatest
# bfloat16 scaled to 15 bits is 32640, so clamping costs at most one unit.
MOST = 127.0 * 256 + 127
SHORTS = ir.VectorType(I16, COUNT)
BYTES = ir.VectorType(I8, 2 * COUNT)
ONES = ir.Constant(SHORTS, [1] * COUNT)
# Four columns' upper bytes, their lower bytes, those of the next four.
IN_TURN = [half + c + i for c in range(0, COUNT, 4) for half in (0, COUNT) for i in range(4)]


def set_bytes(builder, row, dim):
    """Replaces a row `[dim]` of int16 by its bytes `[dim // 4, 2, 4]`.

    Behind them it writes an int32 for each group of columns, where `Sums` starts: -8 times the sum
    of its queries.
    """
    places = builder.add(row, builder.mul(dim, i64(2)))

    def split(column):
        total = I32_ZEROS
        for start in range(0, GROUP, COUNT):
            place = at(builder, row, builder.mul(builder.add(column, i64(start)), i64(2)), SHORTS)
            words = load(builder, place, 2)
            total = add_int16_pairs(builder, total, words, ONES)
            pointer = builder.bitcast(place, BYTES.as_pointer())
            store(builder, _bytes(builder, words), pointer, 2)
        total = builder.mul(folded(builder, total, ir.IRBuilder.add), I32(-8))
        place = builder.mul(builder.udiv(column, i64(GROUP)), i64(4))
        builder.store(total, at(builder, places, place, I32))

    along(builder, GROUP, i64(0), dim, split)


def _bytes(builder, words):
    """The bytes of a vector of int16, which are 256 times the upper one plus the lower one."""
    lower = builder.trunc(words, ir.VectorType(I8, COUNT))
    rest = builder.sub(words, builder.sext(lower, SHORTS))
    upper = builder.trunc(builder.lshr(rest, _all(SHORTS, 8)), lower.type)
    return builder.shuffle_vector(upper, lower, picks(IN_TURN))


def _spread(builder, row, index):
    """An int32 of a row of queries in all lanes."""
    return spread(builder, builder.load(builder.gep(row, [index])))


def nibbles(builder, bits):
    """Of bytes the numbers in their lower four bits, and those in the upper ones, all plus 8."""
    upper = builder.lshr(bits, _all(I32_VECTOR, 4))
    mask, sign = (_all(I32_VECTOR, 0x01010101 * number) for number in (15, 8))
    return [builder.xor(builder.and_(half, mask), sign) for half in (bits, upper)]


class Sums:
    """Products of a group's columns, added up for a row of queries: upper bytes and lower ones."""

    def __init__(self, builder, row, dim, column):
        """`row` is a pointer to int32, `column` the first one of a group."""
        place = builder.add(builder.lshr(dim, i64(1)), builder.udiv(column, i64(GROUP)))
        self.row, self.firsts = row, [I32_ZEROS, _spread(builder, row, place)]
        self.next = builder.lshr(column, i64(1))
        # Without VNNI pairs are added up in 16 bits: those of a group stay below 2**15.
        self.parts = self.firsts if HAS_VNNI else [_all(SHORTS, 0)] * 2

    def add(self, builder, numbers):
        """Adds the next four columns of the query and of some keys, as `nibbles` gives them."""
        add = add_bytes if HAS_VNNI else add_byte_pairs
        query_bytes = [_spread(builder, self.row, builder.add(self.next, i64(i))) for i in range(2)]
        both = zip(self.parts, query_bytes, strict=True)
        self.parts = [add(builder, part, numbers, four) for part, four in both]
        self.next = builder.add(self.next, i64(2))

    def total(self, builder):
        """The sum of each key."""
        upper, lower = self.parts
        if not HAS_VNNI:
            both = zip(self.firsts, self.parts, strict=True)
            upper, lower = (add_int16_pairs(builder, first, part, ONES) for first, part in both)
        return builder.add(builder.shl(upper, _all(I32_VECTOR, 8)), lower)


def _all(kind, number):
    return ir.Constant(kind, [number] * kind.count)

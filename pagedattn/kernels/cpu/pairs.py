"""Numbers of a cache as bfloat16, of which the CPU multiplies pairs at once.

Those of eight bits are looked up: a table of 256 would be too large for the registers, but the two
bytes of bfloat16 have one each, and the numbers below 0 are mostly those above with another sign.
"""

import ml_dtypes
import numpy as np
from llvmlite import ir
from numba import types

from .kinds import UNITS
from .lanes import LANES, LINE, LOOK_UPS, PAIRS, looked_up, picks

NAMES = {types.uint8: "float8_e4m3fn", types.uint32: "float8_e5m2", types.int8: "int8"}
COUNT = 2 * LANES  # bfloat16 in a vector
SIGN = 0x80


def are_pairs(query_kind, kind):
    """Whether queries and a cache of these kinds are multiplied as pairs of bfloat16, exactly."""
    if query_kind != types.uint16:
        return False
    return PAIRS if kind == types.uint16 else LOOK_UPS and kind in NAMES


def counts(kind):
    """How many numbers of a cache's row are best made bfloat16 at a time, and at least."""
    return (LINE, COUNT) if kind in NAMES else (COUNT,)


def as_pairs(builder, numbers, kind):
    """Vectors of bfloat16 of numbers of a kind, which are COUNT or LINE; in order."""
    if kind == types.uint16:
        return [numbers]
    given = numbers.type.count
    if given < LINE:
        numbers = builder.shuffle_vector(numbers, numbers, picks([*range(given)] * 2))
    halves = [_byte(builder, numbers, table, kind == types.int8) for table in _tables(kind)]
    words = ir.VectorType(ir.IntType(16), COUNT)
    vectors = []
    for start in range(0, given, COUNT):
        lanes = [lane + half for lane in range(start, start + COUNT) for half in (0, LINE)]
        vectors.append(builder.bitcast(builder.shuffle_vector(*halves, picks(lanes)), words))
    return vectors


def _tables(kind):
    """The lower and the upper byte of the bfloat16 of each number, by its bits."""
    name = NAMES[kind]
    bits = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, name, name))
    exact = (bits.astype(np.float32) / UNITS.get(name, 1.0)).astype(ml_dtypes.bfloat16)
    return exact.view(np.uint8).reshape(256, 2).T.tolist()


def _byte(builder, numbers, table, twos):
    if twos:
        least = ir.Constant(numbers.type, [SIGN] * LINE)
        zero = ir.Constant(numbers.type, [0] * LINE)
        negative = builder.icmp_signed("<", numbers, zero)
        size = builder.select(negative, builder.sub(zero, numbers), numbers)
        found = looked_up(builder, table[:SIGN], size)
        if table[SIGN] == 0:
            return found
        found = builder.or_(found, builder.and_(numbers, least))
        return builder.select(builder.icmp_signed("==", numbers, least), ir.Constant(numbers.type, [table[SIGN]] * LINE), found)
    above, below = table[:SIGN], table[SIGN:]
    found = looked_up(builder, above, numbers)
    if below == above:
        return found
    if below == [byte | SIGN for byte in above]:
        sign = builder.and_(numbers, ir.Constant(numbers.type, [SIGN] * LINE))
        return builder.or_(found, sign)
    negative = builder.icmp_signed("<", numbers, ir.Constant(numbers.type, [0] * LINE))
    return builder.select(negative, looked_up(builder, below, numbers), found)

"""The product that prompts are made of: a few rows of A times packed columns of B, in registers.

A lies in slabs: `[slab][row][LANES numbers, or pairs of bfloat16]`, the rows of a block side by
side. B lies in panels of PANEL columns: `[panel][number or pair of a column][PANEL]`, a pair being
two neighbours of a column. So no address in the inner loop depends on a size that is not known when
this is compiled, and AMX takes the same layout as `vdpbf16ps`.
"""

from typing import NamedTuple

from numba import types
from numba.core import cgutils

from .. import rates
from ..bf16_dot import can_be_pairs
from ..compiling import intrinsic
from ..dtypes import pair_of
from ..simd import (
    F32,
    I32,
    I64,
    LANES,
    VECTOR,
    ZEROS,
    add_pairs,
    at,
    fused,
    i64,
    load,
    spread,
    store,
)
from . import amx

PANEL = 16  # columns of B
LINE = 4 * PANEL  # bytes of a panel's row
SLAB = 4 * LANES  # bytes of a row of A in a slab
UNROLLED = 4


class MicroKernel(NamedTuple):
    """How a pair of dtypes is multiplied.

    Fields:
      rows, columns: of C, that are in registers at a time; `few`: rows of a smaller C, as wide.
      block: rows that go through the softmax together, a multiple of `rows`.
      decode_rows: rows of a KV head up to which decode's kernel is faster, as measured.
      pairs: whether A and B are pairs of bfloat16, rather than float32.
      tiles: whether the registers are AMX's.
    """

    rows: int
    few: int
    columns: int
    block: int
    decode_rows: int
    pairs: bool = False
    tiles: bool = False

    @property
    def size(self) -> int:
        """Bytes of a number of A and B."""
        return 2 if self.pairs else 4

    @property
    def depth(self) -> int:
        """Numbers of a row of A in a slab."""
        return SLAB // self.size


# As many rows as registers hold: 32 of 16 or of 4 lanes, 16 of 8 lanes.
OF_FLOATS = {
    16: MicroKernel(12, 4, 32, 24, 96),
    8: MicroKernel(6, 4, 16, 24, 32),
    4: MicroKernel(6, 4, 16, 12, 96),
}[LANES]
OF_PAIRS = MicroKernel(12, 4, 32, 24, 64, pairs=True)
OF_TILES = MicroKernel(32, 16, 32, 32, 8, pairs=True, tiles=True)


def micro_kernel(query_dtype, cache_dtype) -> MicroKernel:
    """The one for queries and a cache of two dtypes."""
    if not can_be_pairs(query_dtype, cache_dtype):
        return OF_FLOATS
    return of_pairs()


def of_pairs() -> MicroKernel:
    """That of bfloat16, by what the process may use and by what was measured."""
    if amx.is_allowed():
        return OF_TILES
    return OF_PAIRS if rates.pairs_are_faster() else OF_FLOATS


def kernel_of(dtypes) -> MicroKernel:
    """That of the type of the pair of dtypes that Numba hands on."""
    return micro_kernel(*pair_of(dtypes))


def constant(of):
    """A number that follows from the dtypes, known when the caller is compiled."""

    @intrinsic
    def number(typing, dtypes):
        def code(context, builder, signature, args):
            return i64(of(kernel_of(signature.args[0])))

        return types.intp(dtypes), code

    return number


rows, few, in_place, columns, block, size, depth = (
    constant(of)
    for of in (
        lambda kernel: kernel.rows,
        lambda kernel: kernel.few,
        # Rows that are multiplied without packing. AMX sums a slab up in an order of its own.
        lambda kernel: 0 if kernel.tiles else 3 * kernel.few,
        lambda kernel: kernel.columns,
        lambda kernel: kernel.block,
        lambda kernel: kernel.size,
        lambda kernel: kernel.depth,
    )
)


def _product(rows):
    """Makes `product` of some rows.

    A row's bits are the same among few rows and many: its sums have one order.
    """

    @intrinsic
    def product(typing, c, row_bytes, a, panels, panel_bytes, slabs, adds, dtypes):
        """`C = A @ B`, added to C if `adds`, with `columns`; C's rows are `row_bytes` apart."""

        def code(context, builder, signature, args):
            kernel = kernel_of(signature.args[-1])
            make = amx.product if kernel.tiles else _in_registers
            make(builder, kernel, rows(kernel), args[:-2], args[-2])
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6, types.boolean, dtypes), code

    return product


product, few_product = _product(lambda kernel: kernel.rows), _product(lambda kernel: kernel.few)


def _in_registers(builder, kernel, rows, arguments, adds):
    c, row_bytes, a, panels, panel_bytes, slabs = arguments
    vectors = kernel.columns // LANES
    tile = [(row, v) for row in range(rows) for v in range(vectors)]
    lines = [builder.add(c, builder.mul(row_bytes, i64(row))) for row in range(rows)]
    places = {(row, v): at(builder, lines[row], i64(4 * LANES * v), VECTOR) for row, v in tile}
    totals = {}
    for place in tile:
        first = builder.select(adds, load(builder, places[place], 4), ZEROS)
        totals[place] = cgutils.alloca_once_value(builder, first)
    starts = []
    for v in range(vectors):
        panel, within = divmod(v * LANES, PANEL)
        offset = builder.add(builder.mul(panel_bytes, i64(panel)), i64(4 * within))
        starts.append(builder.add(panels, offset))
    number = I32 if kernel.pairs else F32
    slab_bytes = i64(kernel.block * SLAB)

    def add_steps(slab, step):
        """UNROLLED numbers of A's rows, times as many rows of B."""
        a_here = builder.add(builder.mul(slab, slab_bytes), builder.mul(step, i64(4)))
        a_here = builder.add(a, a_here)
        line = builder.add(builder.mul(slab, i64(LANES)), step)
        b_here = [builder.add(start, builder.mul(line, i64(LINE))) for start in starts]
        for ahead in range(UNROLLED):
            places = [at(builder, here, i64(LINE * ahead), VECTOR) for here in b_here]
            right = [load(builder, place, 4) for place in places]
            for row in range(rows):
                left = at(builder, a_here, i64(row * SLAB + 4 * ahead), number)
                left = spread(builder, load(builder, left, 4), LANES)
                for v, columns in enumerate(right):
                    total = totals[row, v]
                    held = builder.load(total)
                    builder.store(multiplied(builder, kernel, held, left, columns), total)

    with cgutils.for_range_slice(builder, i64(0), slabs, i64(1), I64) as (slab, _):
        steps = i64(0), i64(LANES), i64(UNROLLED), I64
        with cgutils.for_range_slice(builder, *steps) as (step, _):
            add_steps(slab, step)
    for place in tile:
        store(builder, builder.load(totals[place]), places[place], 4)


def multiplied(builder, kernel, total, left, right):
    """The total plus products of numbers, or of pairs."""
    if kernel.pairs:
        return add_pairs(builder, total, left, right)
    return fused(builder, left, right, total)


@intrinsic
def configure(typing, memory, dtypes):
    """Makes this thread's registers ready; `memory` is room for `amx.CONFIG_BYTES`."""

    def code(context, builder, signature, args):
        if kernel_of(signature.args[-1]).tiles:
            amx.configure(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.intp, dtypes), code


@intrinsic
def release(typing, dtypes):
    """Gives this thread's registers back."""

    def code(context, builder, signature, args):
        if kernel_of(signature.args[-1]).tiles:
            amx.release(builder)
        return context.get_dummy_value()

    return types.void(dtypes), code

"""The two products of attention on small tiles, as LLVM vectors.

LLVM does not find these forms from loops: accumulators that stay in registers, each key widened to
float32 once for several rows, and sixteen sums across vectors by one tree of shuffles.
"""

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config

from .compiling import intrinsic

NUMBA: Any = config
FEATURES = NUMBA.CPU_FEATURES or binding.get_host_cpu_features().flatten()  # as Numba does
LANES = 16 if "+avx512bw" in FEATURES else 8 if "+avx2" in FEATURES else 4
# Registers bound the tiles: those with AVX-512 and NEON have 32, others 16.
MANY = LANES != 8
ROWS = 4  # rows of a tile: query heads of a group, and tokens
KEYS = 4 if MANY else 2  # keys of a tile of logits
SPAN = 4 if MANY else 2  # vectors of a value row in a tile of sums

PAIRS = "+avx512bf16" in FEATURES  # products of pairs of bfloat16, added up in float32

WORD, FLOAT = ir.IntType(64), ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
ZEROS = ir.Constant(VECTOR, [0.0] * LANES)


def _int(number):
    return ir.Constant(WORD, number)


def _number_type(kind):
    """The LLVM type that a number of the cache has in memory."""
    return {types.uint16: ir.IntType(16), types.float16: ir.HalfType()}.get(kind, FLOAT)


def _at(builder, address, offset, kind):
    return builder.inttoptr(builder.add(address, offset), kind.as_pointer())


def widened(builder, numbers, kind):
    """Numbers of the cache, or a vector of them, as float32."""
    count = getattr(numbers.type, "count", None)
    wide, bits = FLOAT, ir.IntType(32)
    if count:
        wide, bits = ir.VectorType(wide, count), ir.VectorType(bits, count)
    if kind == types.uint16:
        shift = ir.Constant(bits, [16] * count if count else 16)
        return builder.bitcast(builder.shl(builder.zext(numbers, bits), shift), wide)
    return builder.fpext(numbers, wide) if kind == types.float16 else numbers


def narrowed(builder, numbers, kind):
    """A vector of float32 as numbers of the cache, rounded to even."""
    if kind == types.uint16:
        return _bfloat16(builder, numbers)
    if kind == types.float16:
        return builder.fptrunc(numbers, ir.VectorType(ir.HalfType(), LANES))
    return numbers


def _bfloat16(builder, numbers):
    bits, half = (ir.VectorType(ir.IntType(size), LANES) for size in (32, 16))

    def all_lanes(number):
        return ir.Constant(bits, [number] * LANES)

    given = builder.bitcast(numbers, bits)
    upper = builder.lshr(given, all_lanes(16))
    up = builder.add(builder.and_(upper, all_lanes(1)), all_lanes(0x7FFF))
    rounded = builder.lshr(builder.add(given, up), all_lanes(16))
    quiet = builder.or_(upper, all_lanes(0x40))  # NaN: rounding could turn it into infinity
    is_nan = builder.fcmp_unordered("uno", numbers, numbers)
    return builder.trunc(builder.select(is_nan, quiet, rounded), half)


def load(builder, pointer, align):
    value = builder.load(pointer)
    value.align = align
    return value


def row_vector(builder, row, index, kind, count=LANES):
    """Numbers of a row of the cache from `index` on, as they are."""
    size = kind.bitwidth // 8
    numbers = ir.VectorType(_number_type(kind), count)
    return load(builder, _at(builder, row, builder.mul(index, _int(size)), numbers), size)


def row_end(builder, row, index, end, kind, count=LANES):
    """The last numbers of a row, and zeros: nothing past the row is read."""
    number, size = _number_type(kind), kind.bitwidth // 8
    room = cgutils.alloca_once(builder, ir.VectorType(number, count))
    builder.store(ir.Constant(ir.VectorType(number, count), None), room)
    left = builder.mul(builder.sub(end, index), _int(size))
    source = _at(builder, row, builder.mul(index, _int(size)), ir.IntType(8))
    cgutils.raw_memcpy(builder, room, source, left, 1)
    return builder.load(room)


def each(builder, row_kind, dim, count, body):
    """`body(index, take)` along a row, where `take(row)` gives `count` numbers from there on."""
    stop = along(
        builder,
        count,
        _int(0),
        dim,
        lambda i: body(i, lambda row: row_vector(builder, row, i, row_kind, count)),
    )
    with builder.if_then(builder.icmp_signed("<", stop, dim), likely=False):
        body(stop, lambda row: row_end(builder, row, stop, dim, row_kind, count))


def along(builder, width, begin, end, body):
    """`body(index)` for each whole `width` from `begin` to `end`; gives where they stop."""
    whole = builder.mul(builder.udiv(builder.sub(end, begin), _int(width)), _int(width))
    stop = builder.add(begin, whole)
    with cgutils.for_range_slice(builder, begin, stop, _int(width), WORD) as (index, _):
        body(index)
    return stop


def fetch(builder, row, index, size):
    """Asks for the cache line of an element of a row, into the second level."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    function = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
    hints = [word(hint) for hint in (0, 2, 1)]  # to read, second level, data
    address = builder.add(row, builder.mul(index, _int(size)))
    builder.call(function, [builder.inttoptr(address, byte), *hints])


def fused(builder, a, b, c):
    """a * b + c."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    name = f"llvm.fma.v{LANES}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [a, b, c])


def spread(builder, number, count=LANES):
    """A number in all lanes."""
    empty = ir.Constant(ir.VectorType(FLOAT, count), ir.Undefined)
    one = builder.insert_element(empty, number, ir.IntType(32)(0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), count), [0] * count)
    return builder.shuffle_vector(one, empty, lanes)


def sums(builder, vectors):
    """The sum of each of some vectors, as one vector; their number is a power of 2, to LANES.

    Each step adds the halves of all segments of a pair of vectors, side by side in one vector.
    """
    segment = LANES
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [_halved(builder, a, b, segment, 2 * LANES) for a, b in pairs]
        segment //= 2
    (vector,), lanes = vectors, LANES
    while segment > 1:
        vector = _halved(builder, vector, vector, segment, lanes)
        segment, lanes = segment // 2, lanes // 2
    return vector


def _halved(builder, a, b, segment, lanes):
    half = segment // 2
    picks = [start + lane for start in range(0, lanes, segment) for lane in range(half)]
    kind = ir.VectorType(ir.IntType(32), len(picks))
    low = builder.shuffle_vector(a, b, ir.Constant(kind, picks))
    high = builder.shuffle_vector(a, b, ir.Constant(kind, [pick + half for pick in picks]))
    return builder.fadd(low, high)


class BFloat16(ir.HalfType):
    """LLVM's bfloat, which llvmlite does not know."""

    def __str__(self):
        return "bfloat"


class Products:
    """How queries and keys of a kind are multiplied: in float32, or as pairs of bfloat16."""

    def __init__(self, kind):
        self.kind = kind
        self.pairs = PAIRS and kind == types.uint16
        self.count = LANES * 2 if self.pairs else LANES
        self.query_kind: Any = types.uint16 if self.pairs else types.float32

    def operand(self, builder, numbers):
        """Numbers of the cache or the query, as they are multiplied."""
        return numbers if self.pairs else widened(builder, numbers, self.kind)

    def add(self, builder, total, a, b):
        """The total plus the products, LANES sums."""
        if not self.pairs:
            return fused(builder, a, b, total)
        pairs = ir.VectorType(BFloat16(), self.count)
        kind = ir.FunctionType(VECTOR, [VECTOR, pairs, pairs])
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(function, [total, *(builder.bitcast(x, pairs) for x in (a, b))])


def _dots(rows):
    """Makes the products of `rows` queries and KEYS keys."""

    @intrinsic
    def dots(typing, query, step, plane, offsets, ahead, dim, scale, logits, width, kind):
        """Logits `[rows, KEYS]`, `width` apart, of queries and of keys at byte offsets.

        What the addresses `ahead` point to, one for each key, is fetched into the cache meanwhile.
        """

        def code(context, builder, signature, args):
            query, step, plane, offsets, ahead, dim, scale, logits, width, _ = args
            products = Products(signature.args[-1].dtype)
            tile = [(r, k) for r in range(rows) for k in range(KEYS)]
            totals = {at: cgutils.alloca_once_value(builder, ZEROS) for at in tile}
            words = range(0, 8 * KEYS, 8)
            keys = [builder.load(_at(builder, offsets, _int(at), WORD)) for at in words]
            keys = [builder.add(plane, key) for key in keys]
            later = [builder.load(_at(builder, ahead, _int(at), WORD)) for at in words]
            starts = [builder.add(query, builder.mul(step, _int(r))) for r in range(rows)]

            def add(index, take):
                taken = [products.operand(builder, take(key)) for key in keys]
                for row in later:
                    fetch(builder, row, index, products.kind.bitwidth // 8)
                for r, start in enumerate(starts):
                    row = row_vector(builder, start, index, products.query_kind, products.count)
                    for k, key in enumerate(taken):
                        total = products.add(builder, builder.load(totals[r, k]), row, key)
                        builder.store(total, totals[r, k])

            each(builder, products.kind, dim, products.count, add)
            found = [builder.load(totals[at]) for at in tile]
            _store_tile(builder, found, rows, scale, logits, width)
            return context.get_dummy_value()

        arguments = [types.intp] * 6 + [types.float32] + [types.intp] * 2
        return types.void(*arguments, kind), code

    return dots


def _store_tile(builder, found, rows, scale, logits, width):
    at_once = min(rows, LANES // KEYS)
    for first in range(0, rows, at_once):
        packed = sums(builder, found[first * KEYS : (first + at_once) * KEYS])
        scales = spread(builder, scale, packed.type.count)
        packed = builder.fmul(packed, scales)
        for r in range(at_once):
            picks = ir.VectorType(ir.IntType(32), KEYS)(list(range(r * KEYS, (r + 1) * KEYS)))
            row = builder.shuffle_vector(packed, packed, picks)
            place = builder.add(logits, builder.mul(width, _int(4 * (first + r))))
            builder.store(row, _at(builder, place, _int(0), row.type)).align = 4


def _mix(rows):
    """Makes the sums of value rows by the weights of `rows` queries."""

    @intrinsic
    def mix(typing, sums, step, plane, offsets, ahead, count, dim, weights, width, kept, kind):
        """`sums[r] = sums[r] * kept[r] + weights[r] @ values`, of values at byte offsets."""

        def code(context, builder, signature, args):
            sums, step, plane, offsets, ahead, count, dim, weights, width, kept, _ = args
            number = signature.args[-1].dtype

            def add(index, span, take):
                tile = [(r, v) for r in range(rows) for v in range(span)]
                places, totals = {}, {}
                for r, v in tile:
                    start = builder.add(sums, builder.mul(step, _int(r)))
                    offset = builder.mul(builder.add(index, _int(v * LANES)), _int(4))
                    places[r, v] = _at(builder, start, offset, VECTOR)
                    factor = builder.load(_at(builder, kept, _int(4 * r), FLOAT))
                    total = load(builder, places[r, v], 4)
                    total = builder.fmul(total, spread(builder, factor))
                    totals[r, v] = cgutils.alloca_once_value(builder, total)
                with cgutils.for_range(builder, count) as loop:
                    eight = builder.mul(loop.index, _int(8))
                    row = builder.add(plane, builder.load(_at(builder, offsets, eight, WORD)))
                    later = builder.load(_at(builder, ahead, eight, WORD))
                    line = 64 // (number.bitwidth // 8)
                    for start in range(0, span * LANES, line):
                        fetch(builder, later, builder.add(index, _int(start)), number.bitwidth // 8)
                    values = [take(row, builder.add(index, _int(v * LANES))) for v in range(span)]
                    for r in range(rows):
                        start = builder.add(weights, builder.mul(width, _int(4 * r)))
                        four = builder.mul(loop.index, _int(4))
                        weight = spread(builder, builder.load(_at(builder, start, four, FLOAT)))
                        for v in range(span):
                            total = builder.load(totals[r, v])
                            total = fused(builder, weight, values[v], total)
                            builder.store(total, totals[r, v])
                for at in tile:
                    builder.store(builder.load(totals[at]), places[at]).align = 4

            def whole(row, i):
                return widened(builder, row_vector(builder, row, i, number), number)

            def end(row, i):
                return widened(builder, row_end(builder, row, i, dim, number), number)

            stop = along(builder, SPAN * LANES, _int(0), dim, lambda i: add(i, SPAN, whole))
            stop = along(builder, LANES, stop, dim, lambda i: add(i, 1, whole))
            with builder.if_then(builder.icmp_signed("<", stop, dim), likely=False):
                add(stop, 1, end)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 10, kind), code

    return mix


dots_1, dots_2, dots_4 = map(_dots, (1, 2, 4))
mix_1, mix_2, mix_4 = map(_mix, (1, 2, 4))


@intrinsic
def set_query(typing, source, row, dim, kind):
    """A row of queries as `dots` takes it, with zeros up to a whole vector."""

    def code(context, builder, signature, args):
        source, row, dim, _ = args
        products = Products(signature.args[-1].dtype)

        def put(index, take):
            numbers = products.operand(builder, take(source))
            offset = builder.mul(index, _int(products.query_kind.bitwidth // 8))
            builder.store(numbers, _at(builder, row, offset, numbers.type)).align = 2

        each(builder, products.kind, dim, products.count, put)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, kind), code


@intrinsic
def narrow_row(typing, row, scale, out, dim, kind):
    """`out = row * scale`, rounded to even; a row has whole vectors of float32, `out` may not."""

    def code(context, builder, signature, args):
        row, scale, out, dim, _ = args
        number, factor = signature.args[-1].dtype, spread(builder, scale)

        def rounded(index):
            numbers = load(builder, _at(builder, row, builder.mul(index, _int(4)), VECTOR), 4)
            return narrowed(builder, builder.fmul(numbers, factor), number)

        def put(index):
            numbers = rounded(index)
            offset = builder.mul(index, _int(number.bitwidth // 8))
            place = _at(builder, out, offset, numbers.type)
            builder.store(numbers, place).align = number.bitwidth // 8

        stop = along(builder, LANES, _int(0), dim, put)
        with builder.if_then(builder.icmp_signed("<", stop, dim), likely=False):
            numbers = rounded(stop)
            room = cgutils.alloca_once_value(builder, numbers)
            bytes_ = number.bitwidth // 8
            target = builder.add(out, builder.mul(stop, _int(bytes_)))
            left = builder.mul(builder.sub(dim, stop), _int(bytes_))
            cgutils.raw_memcpy(builder, _at(builder, target, _int(0), ir.IntType(8)), room, left, 1)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32, types.intp, types.intp, kind), code


@intrinsic
def highest_of(typing, numbers, count):
    """The highest of some float32; `count` is a multiple of LANES."""

    def code(context, builder, signature, args):
        numbers, count = args
        least = ir.Constant(VECTOR, [-float("inf")] * LANES)
        top = cgutils.alloca_once_value(builder, least)

        def take(index):
            place = _at(builder, numbers, builder.mul(index, _int(4)), VECTOR)
            builder.store(higher(builder, load(builder, place, 4), builder.load(top)), top)

        along(builder, LANES, _int(0), count, take)
        return _folded(builder, builder.load(top), higher)

    return types.float32(types.intp, types.intp), code


def higher(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _folded(builder, vector, join):
    """The lanes of a vector, joined two by two down to one number."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        kind = ir.VectorType(ir.IntType(32), lanes)
        halves = (
            builder.shuffle_vector(
                vector, vector, ir.Constant(kind, [start + lane for lane in range(lanes)])
            )
            for start in (0, lanes)
        )
        vector = join(builder, *halves)
    return builder.extract_element(vector, ir.IntType(32)(0))

"""Logits: products of a few queries and a few keys at a time."""

from numba import types
from numba.core import cgutils

from . import nibble_dot
from .bf16_dot import COUNT, are_pairs, as_pairs, counts
from .compiling import intrinsic
from .dtypes import (
    BFLOAT16,
    FLOAT32,
    INT4,
    INT16,
    each,
    pair_of,
    put_vector,
    row_vector,
    widened,
    widened_counts,
)
from .fixed_point import MOST, are_int16, as_int16, factor_of, set_int16, whole_vectors
from .simd import (
    I32_ZEROS,
    KEYS,
    LANES,
    LINE,
    VECTOR,
    ZEROS,
    add_int16_pairs,
    add_pairs,
    along,
    at,
    fetch,
    fused,
    i64,
    int64s_at,
    picks,
    spread,
    store,
    vectors_of,
)


class Products:
    """How queries and keys of two dtypes are multiplied: in float32."""

    count, query_dtype, zeros = LANES, FLOAT32, ZEROS

    def __init__(self, dtype):
        self.dtype = dtype
        self.counts = widened_counts(dtype)  # columns of a key widened at a time

    def operands(self, builder, numbers, dtype):
        """Numbers of the cache or the query as they are multiplied: vectors of `count` each."""
        return vectors_of(builder, widened(builder, numbers, dtype))

    def add(self, builder, total, a, b):
        """The total plus the products, LANES sums."""
        return fused(builder, a, b, total)

    def set_query(self, builder, source, row, dim, dtype):
        """A row of queries as `operands`, with zeros up to a whole vector."""

        def put(index, take):
            (numbers,) = self.operands(builder, take(source), dtype)
            put_vector(builder, row, index, numbers, self.query_dtype)

        each(builder, dtype, dim, (self.count,), put)

    def floats(self, builder, total):
        """The sums as float32, but for `factor`."""
        return total

    def factor(self, builder, row, dim, scale):
        """What the sums of a query's row are multiplied by."""
        return scale


class Pairs(Products):
    """As pairs of bfloat16."""

    count, query_dtype = COUNT, BFLOAT16

    def __init__(self, dtype):
        super().__init__(dtype)
        self.counts = counts(dtype)

    def operands(self, builder, numbers, dtype):
        return as_pairs(builder, numbers, dtype)

    def add(self, builder, total, a, b):
        return add_pairs(builder, total, a, b)


class Int16Pairs(Products):
    """As pairs of 16-bit integers; a row of queries has a factor at its end.

    An int32 holds 512 sums of the largest products: of 4096 columns with AVX2, 8192 with AVX-512.
    """

    count, query_dtype, zeros, most = COUNT, INT16, I32_ZEROS, MOST

    def __init__(self, dtype):
        super().__init__(dtype)
        self.counts = (COUNT,)

    def operands(self, builder, numbers, dtype):
        return [as_int16(builder, numbers)]

    def add(self, builder, total, a, b):
        return add_int16_pairs(builder, total, a, b)

    def set_query(self, builder, source, row, dim, dtype):
        def put(index, take):
            put_vector(builder, row, index, widened(builder, take(source), dtype), FLOAT32)

        each(builder, dtype, dim, (COUNT,), put)
        set_int16(builder, row, whole_vectors(builder, dim), self.most)

    def floats(self, builder, total):
        return builder.sitofp(total, VECTOR)

    def factor(self, builder, row, dim, scale):
        return builder.fmul(scale, factor_of(builder, row, whole_vectors(builder, dim)))


class Int16Bytes(Int16Pairs):
    """The bytes of such integers, as `qk_int4` takes them."""

    most = nibble_dot.MOST

    def set_query(self, builder, source, row, dim, dtype):
        super().set_query(builder, source, row, dim, dtype)
        nibble_dot.set_bytes(builder, row, dim)


def products_of(query_dtype, dtype):
    if are_int16(query_dtype, dtype):
        return (Int16Bytes if dtype == INT4 else Int16Pairs)(dtype)
    return (Pairs if are_pairs(query_dtype, dtype) else Products)(dtype)


def _code(builder, dtypes, rows, planes, arguments):
    """The sums over some planes of the products of `rows` queries and KEYS keys.

    A row of queries holds those of each plane, one behind the other.
    """
    query, step, offsets, ahead, dim, scale, logits, width = arguments
    products = products_of(*dtypes)
    tile = [(r, k) for r in range(rows) for k in range(KEYS)]
    totals = {at_: cgutils.alloca_once_value(builder, products.zeros) for at_ in tile}
    places, later = (int64s_at(builder, held, KEYS) for held in (offsets, ahead))
    starts = [builder.add(query, builder.mul(step, i64(r))) for r in range(rows)]
    scales = [products.factor(builder, start, dim, scale) for start in starts]
    apart = builder.udiv(step, i64(len(planes)))
    for plane in planes:
        keys = [builder.add(plane, place) for place in places]

        def add(index, take, starts=starts, keys=keys):
            taken = [products.operands(builder, take(key), products.dtype) for key in keys]
            for part, vectors in enumerate(zip(*taken, strict=True)):
                here = builder.add(index, i64(part * products.count))
                for r, start in enumerate(starts):
                    row = row_vector(builder, start, here, products.query_dtype, products.count)
                    for k, key in enumerate(vectors):
                        total = products.add(builder, builder.load(totals[r, k]), row, key)
                        builder.store(total, totals[r, k])

        coming = [builder.add(plane, place) for place in later]
        fetch_rows(builder, coming, builder.mul(dim, i64(products.dtype.size)))
        each(builder, products.dtype, dim, products.counts, add)
        starts = [builder.add(start, apart) for start in starts]
    found = [products.floats(builder, builder.load(totals[at_])) for at_ in tile]
    _store_tile(builder, found, scales, logits, width)


def _qk(rows):
    """Makes the products of `rows` queries and KEYS keys."""

    @intrinsic
    def qk(typing, query, step, plane, offsets, ahead, dim, scale, logits, width, dtypes):
        """Logits `[rows, KEYS]`, `width` apart, of queries and of keys at byte offsets.

        The keys at the offsets `ahead`, as many, are fetched into the cache meanwhile.
        """

        def code(context, builder, signature, args):
            query, step, plane, *others, _ = args
            dtypes = pair_of(signature.args[-1])
            _code(builder, dtypes, rows, [plane], (query, step, *others))
            return context.get_dummy_value()

        arguments = [types.intp] * 6 + [types.float32] + [types.intp] * 2
        return types.void(*arguments, dtypes), code

    return qk


def _qk_of_two(rows):
    """Makes the sums of products of `rows` queries with KEYS keys of two planes."""

    @intrinsic
    def qk(typing, query, step, plane, second, offsets, ahead, dim, scale, logits, width, dtypes):
        """As `qk_1` and its like, of keys at the same offsets in both."""

        def code(context, builder, signature, args):
            query, step, plane, second, *others, _ = args
            dtypes = pair_of(signature.args[-1])
            _code(builder, dtypes, rows, [plane, second], (query, step, *others))
            return context.get_dummy_value()

        arguments = [types.intp] * 7 + [types.float32] + [types.intp] * 2
        return types.void(*arguments, dtypes), code

    return qk


def fetch_rows(builder, rows, row_bytes):
    """By itself: among the products its addresses would push theirs out of the registers."""

    def fetch_line(index):
        for row in rows:
            fetch(builder, row, index, 1)

    whole = builder.add(row_bytes, i64(LINE - 1))  # the last line may be a part of one
    along(builder, LINE, i64(0), whole, fetch_line)


def _store_tile(builder, found, scales, logits, width):
    """Writes the sums of vectors `[rows, KEYS]`, those of a row times its scale, `width` apart."""
    at_once = min(len(scales), LANES // KEYS)
    for first in range(0, len(scales), at_once):
        packed = sums(builder, found[first * KEYS : (first + at_once) * KEYS])
        for r, scale in enumerate(scales[first : first + at_once]):
            row = builder.shuffle_vector(packed, packed, picks(range(r * KEYS, (r + 1) * KEYS)))
            row = builder.fmul(row, spread(builder, scale, KEYS))
            place = builder.add(logits, builder.mul(width, i64(4 * (first + r))))
            store(builder, row, at(builder, place, i64(0), row.type), 4)


def sums(builder, vectors):
    """The sum of each of some vectors, as one vector; their number is a power of 2, to LANES.

    A step adds the halves of all segments of two vectors: those of one in place, to which those of
    the other are swapped, so that one of its two shuffles is a blend. Each segment then has both
    vectors' sums, side by side; vectors begin in the order that leaves theirs in their own.
    """
    vectors, segment = _bit_reversed(vectors), LANES
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [_joined(builder, a, b, segment) for a, b in pairs]
        segment //= 2
    (vector,), lanes = vectors, LANES
    while segment > 1:
        vector = _halved(builder, vector, segment, lanes)
        segment, lanes = segment // 2, lanes // 2
    return vector


def _bit_reversed(items):
    """Every second one first, and of each half again."""
    if len(items) < 2:
        return items
    return [*_bit_reversed(items[::2]), *_bit_reversed(items[1::2])]


def _joined(builder, a, b, segment):
    half = segment // 2
    kept = [lane + LANES * (lane % segment >= half) for lane in range(LANES)]
    swapped = [lane ^ half for lane in kept]
    parts = (builder.shuffle_vector(a, b, picks(lanes)) for lanes in (kept, swapped))
    return builder.fadd(*parts)


def _halved(builder, vector, segment, lanes):
    half = segment // 2
    lower = [start + lane for start in range(0, lanes, segment) for lane in range(half)]
    low = builder.shuffle_vector(vector, vector, picks(lower))
    high = builder.shuffle_vector(vector, vector, picks([lane + half for lane in lower]))
    return builder.fadd(low, high)


qk_1, qk_2, qk_4 = map(_qk, (1, 2, 4))
qk_of_two_1, qk_of_two_2, qk_of_two_4 = map(_qk_of_two, (1, 2, 4))


@intrinsic
def set_query(typing, source, row, dim, dtypes):
    """A row of queries as `qk_1` takes it."""

    def code(context, builder, signature, args):
        source, row, dim, _ = args
        given, dtype = pair_of(signature.args[-1])[:2]
        products_of(given, dtype).set_query(builder, source, row, dim, given)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, dtypes), code

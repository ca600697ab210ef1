"""Logits: products of a few queries and a few keys at a time."""

from numba import types
from numba.core import cgutils

from .bf16_dot import COUNT, are_pairs, as_pairs, counts
from .compiling import intrinsic
from .dtypes import BFLOAT16, FLOAT32, each, pair_of, put_vector, row_vector, widened
from .simd import (
    KEYS,
    LANES,
    LINE,
    WORD,
    ZEROS,
    add_pairs,
    along,
    at,
    fetch,
    fused,
    picks,
    spread,
    store,
    word,
)


class Products:
    """How queries and keys of two dtypes are multiplied: in float32, or as pairs of bfloat16."""

    def __init__(self, query_dtype, dtype):
        self.dtype = dtype
        self.pairs = are_pairs(query_dtype, dtype)
        self.count = COUNT if self.pairs else LANES
        self.counts = counts(dtype) if self.pairs else (LANES,)  # of keys at a time
        self.query_dtype = BFLOAT16 if self.pairs else FLOAT32

    def operands(self, builder, numbers, dtype):
        """Numbers of the cache or the query as they are multiplied: vectors of `count` each."""
        if self.pairs:
            return as_pairs(builder, numbers, dtype)
        return [widened(builder, numbers, dtype)]

    def add(self, builder, total, a, b):
        """The total plus the products, LANES sums."""
        return add_pairs(builder, total, a, b) if self.pairs else fused(builder, a, b, total)


def _code(builder, dtypes, rows, planes, arguments):
    """The sums over some planes of the products of `rows` queries and KEYS keys.

    A row of queries holds those of each plane, one behind the other.
    """
    query, step, offsets, ahead, dim, scale, logits, width = arguments
    products = Products(*dtypes)
    tile = [(r, k) for r in range(rows) for k in range(KEYS)]
    totals = {at_: cgutils.alloca_once_value(builder, ZEROS) for at_ in tile}
    words = [word(8 * k) for k in range(KEYS)]
    places, later = (
        [builder.load(at(builder, held, place, WORD)) for place in words]
        for held in (offsets, ahead)
    )
    starts = [builder.add(query, builder.mul(step, word(r))) for r in range(rows)]
    apart = builder.udiv(step, word(len(planes)))
    for plane in planes:
        keys = [builder.add(plane, place) for place in places]

        def add(index, take, starts=starts, keys=keys):
            taken = [products.operands(builder, take(key), products.dtype) for key in keys]
            for part, vectors in enumerate(zip(*taken, strict=True)):
                here = builder.add(index, word(part * products.count))
                for r, start in enumerate(starts):
                    row = row_vector(builder, start, here, products.query_dtype, products.count)
                    for k, key in enumerate(vectors):
                        total = products.add(builder, builder.load(totals[r, k]), row, key)
                        builder.store(total, totals[r, k])

        coming = [builder.add(plane, place) for place in later]
        fetch_rows(builder, coming, builder.mul(dim, word(products.dtype.size)))
        each(builder, products.dtype, dim, products.counts, add)
        starts = [builder.add(start, apart) for start in starts]
    found = [builder.load(totals[at_]) for at_ in tile]
    store_tile(builder, found, rows, scale, logits, width)


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

    along(builder, LINE, word(0), row_bytes, fetch_line)


def store_tile(builder, found, rows, scale, logits, width):
    at_once = min(rows, LANES // KEYS)
    for first in range(0, rows, at_once):
        packed = sums(builder, found[first * KEYS : (first + at_once) * KEYS])
        packed = builder.fmul(packed, spread(builder, scale, packed.type.count))
        for r in range(at_once):
            row = builder.shuffle_vector(packed, packed, picks(range(r * KEYS, (r + 1) * KEYS)))
            place = builder.add(logits, builder.mul(width, word(4 * (first + r))))
            store(builder, row, at(builder, place, word(0), row.type), 4)


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
    lower = [start + lane for start in range(0, lanes, segment) for lane in range(half)]
    low = builder.shuffle_vector(a, b, picks(lower))
    high = builder.shuffle_vector(a, b, picks([lane + half for lane in lower]))
    return builder.fadd(low, high)


qk_1, qk_2, qk_4 = map(_qk, (1, 2, 4))
qk_of_two_1, qk_of_two_2, qk_of_two_4 = map(_qk_of_two, (1, 2, 4))


@intrinsic
def set_query(typing, source, row, dim, dtypes):
    """A row of queries as `qk_1` takes it, with zeros up to a whole vector."""

    def code(context, builder, signature, args):
        source, row, dim, _ = args
        given, dtype = pair_of(signature.args[-1])
        products = Products(given, dtype)

        def put(index, take):
            (numbers,) = products.operands(builder, take(source), given)
            put_vector(builder, row, index, numbers, products.query_dtype)

        each(builder, given, dim, (products.count,), put)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, dtypes), code

"""Keys and values of four bits of a chunk, unpacked for products of the query's dtype."""

from .compiling import fast, within
from .memory import get_float32, get_int64, memset, put_int64
from .simd import LINE
from .softmax import AHEAD, CHUNK, NONE
from .unpack import GROUP, fetch_row, unpack_row, up_to


@fast
def packed_room(args):
    """Bytes for a chunk: offsets of rows, and behind them the rows, unpacked.

    Or what sums of values that are not unpacked need: for each value a byte a column, the scales of
    its groups, and four rows' weights, or instead of bytes weights for each group.
    """
    as_held = args.value_columns + 4 * (args.value_columns // GROUP) + 4 * 4
    return unpacked_rows(0) + CHUNK * max(unpacked_bytes(args), as_held)


@fast
def unpacked_rows(scratch):
    return scratch + 16 * CHUNK


@fast
def unpacked_bytes(args):
    """Those of an unpacked row."""
    return up_to(max(args.head_dim, args.value_columns) * args.itemsize, LINE)


@fast
def set_unpacked_offsets(args, scratch):
    """The offsets of unpacked rows, again and again: what is fetched ahead is one of them."""
    for k in range(2 * CHUNK):
        put_int64(scratch, k, k % CHUNK * unpacked_bytes(args))


@within
def fetch_share(coming, count, row_bytes, part, parts):
    """Fetches one of `parts` shares of the rows to come: more at once keep loads waiting."""
    for k in range(part * CHUNK // parts, min(count, (part + 1) * CHUNK // parts)):
        fetch_row(coming.plane + get_int64(coming.offsets, k), row_bytes)


@within
def unpack_keys(args, held, plane, offsets, slots, head, count, scratch):
    """Some keys of a head, while those of the next group are fetched."""
    out, size = unpacked_rows(scratch), unpacked_bytes(args)
    for k in range(count):
        fetch_row(plane + get_int64(offsets, k + AHEAD), args.head_dim // 2)
        source, index = plane + get_int64(offsets, k), get_int64(slots, k) + head
        unpack_row(
            source, args.key_scales, index, out + k * size, args.head_dim, args.itemsize, held
        )


@within
def unpack_values(args, held, plane, offsets, coming, slots, head, count, scratch):
    """A chunk's values of a head, of an even number of keys, while those to come are fetched."""
    out, size = unpacked_rows(scratch), unpacked_bytes(args)
    dim = args.value_columns
    for k in range(up_to(count, 2)):
        fetch_row(coming.plane + get_int64(coming.offsets, k), dim // 2)
        source, index = plane + get_int64(offsets, k), get_int64(slots, k) + head
        unpack_row(source, args.value_scales, index, out + k * size, dim, args.itemsize, held)


@fast
def clear_rows(args, shown, count, scratch):
    """Zeros for the values that a bias hides from all."""
    for k in range(up_to(count, 2)):
        if get_float32(shown, k) == NONE:
            memset(unpacked_rows(scratch) + k * unpacked_bytes(args), 0, unpacked_bytes(args))

"""Where a work item keeps its queries, sums and weights, and a packed tile of keys and values."""

from typing import NamedTuple

from ..call_args import APART, WORK_ITEM
from ..compiling import fast
from ..simd import LANES
from ..unpack import by_token, up_to
from . import amx
from .micro_kernel import LINE, PANEL, SLAB, block, columns, depth, size

ITEM_BYTES = WORK_ITEM.itemsize
KEYS = 256  # of a tile
# Keys whose sums are begun anew and then joined in order, where results are batch-invariant: so it
# makes no difference which work items they are of.
SEGMENT = 2 * KEYS
MOST_ROWS, MOST_COLUMNS = 96, 32  # a multiple of any block's rows, and any product's columns
ADDRESS_BYTES = 8
GRAIN = max(2 * LANES, PANEL)  # keys: what any product and loop over weights takes, times a number


class State(NamedTuple):
    """Addresses of rows: their sums, the logit that these are relative to, and LANES totals."""

    sums: int
    highest: int
    totals: int


class Room(NamedTuple):
    """Addresses, and sizes that follow from the call.

    Fields:
      item: the work item, as if it had this KV head alone.
      config: of AMX's registers.
      zeros: a row of the cache that holds nothing.
      keys: addresses of keys and values, as `keys_at` has them; `shown`: whether any row sees one.
      unpacked: rows of the tile's keys, and behind them of its values, of the query's dtype.
      key_panels, value_panels: the tile's.
      logits, weights: those of a block of rows.
      queries: those of the item.
      state: what the item's rows sum up of the keys so far, or of a segment.
      joined: that of all segments so far.
      end: what lies behind it all.
      query_bytes, sum_bytes: of a row.
      key_panel_bytes, value_panel_bytes: of a panel.
      sum_columns: of a row.
    """

    item: int
    config: int
    zeros: int
    keys: int
    shown: int
    unpacked: int
    key_panels: int
    value_panels: int
    logits: int
    weights: int
    queries: int
    state: State
    joined: State
    end: int
    query_bytes: int
    sum_bytes: int
    key_panel_bytes: int
    value_panel_bytes: int
    sum_columns: int


@fast
def row_bytes(args, dtypes):
    """Those of a row of queries and of one of sums."""
    query = up_to(args.head_dim, depth(dtypes)) * size(dtypes)
    return query, 4 * up_to(args.value_dim, columns(dtypes))


@fast
def state_at(args, dtypes, rows, address):
    """The state of a number of rows, from an address on, and where it ends."""
    rows = up_to(rows, block(dtypes))
    highest = address + up_to(rows * row_bytes(args, dtypes)[1], APART)
    totals = highest + up_to(4 * rows, APART)
    return State(address, highest, totals), totals + up_to(rows * SLAB, APART)


@fast
def state_bytes(args, rows):
    """No fewer than any state of so many rows has, whatever the dtypes are."""
    rows = up_to(rows, MOST_ROWS)
    return up_to(rows * (4 * up_to(args.value_dim, MOST_COLUMNS) + 4 + SLAB) + 3 * APART, APART)


@fast
def unpacked_bytes(args):
    """Those of a row of the query's dtype, which is no smaller than the cache's."""
    return up_to(max(args.head_dim, args.value_columns) * args.itemsize, APART)


@fast
def keys_at(room, first):
    """Where the addresses of a tile's keys are, its values' behind them; two tiles have room."""
    return room.keys + first // KEYS % 2 * (2 * KEYS * ADDRESS_BYTES)


@fast
def values_at(room, first):
    return keys_at(room, first) + KEYS * ADDRESS_BYTES


@fast
def room_of(args, dtypes, held, rows, address):
    """The room for a number of rows of a KV head, from an address on, a multiple of APART."""
    query_bytes, sum_bytes = row_bytes(args, dtypes)
    rows, number = up_to(rows, block(dtypes)), size(dtypes)
    key_panel_bytes, value_panel_bytes = query_bytes // 4 * LINE, KEYS * number // 4 * LINE
    config = address + ITEM_BYTES
    zeros = config + up_to(amx.CONFIG_BYTES, APART)
    keys = zeros + unpacked_bytes(args)
    shown = keys + 4 * KEYS * ADDRESS_BYTES
    unpacked = shown + 4 * KEYS
    key_panels = unpacked
    if by_token(held):
        key_panels += 2 * KEYS * unpacked_bytes(args)
    value_panels = key_panels + KEYS // PANEL * key_panel_bytes
    logits = value_panels + sum_bytes // LINE * value_panel_bytes
    weights = logits + 4 * KEYS * block(dtypes)
    queries = weights + number * KEYS * block(dtypes)
    state, end = state_at(args, dtypes, rows, queries + up_to(rows * query_bytes, APART))
    joined = state
    if args.longest == 0:
        joined, end = state_at(args, dtypes, rows, end)
    return Room(
        address,
        config,
        zeros,
        keys,
        shown,
        unpacked,
        key_panels,
        value_panels,
        logits,
        weights,
        queries,
        state,
        joined,
        end,
        query_bytes,
        sum_bytes,
        key_panel_bytes,
        value_panel_bytes,
        sum_bytes // 4,
    )


@fast
def room_bytes(args, dtypes, held, rows):
    return up_to(room_of(args, dtypes, held, rows, 0).end, APART)


class Rooms(NamedTuple):
    """The rooms of an item's KV heads, one behind the other."""

    address: int
    bytes: int
    heads: int
    rows: int  # of each


@fast
def rooms_of(args, dtypes, held, item, address):
    rows = item.num_queries * args.group
    return Rooms(address, room_bytes(args, dtypes, held, rows), item.num_heads, rows)


@fast
def room_at(args, dtypes, held, rooms, head):
    return room_of(args, dtypes, held, rooms.rows, rooms.address + head * rooms.bytes)

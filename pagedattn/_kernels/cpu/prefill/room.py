"""Where a work item keeps its queries, sums and weights, and a packed tile of keys and values."""

from typing import NamedTuple

from ..call_args import APART
from ..compiling import fast
from . import amx
from .micro_kernel import LINE, PANEL, SLAB, block, columns, depth, size

KEYS = 256  # of a tile
GRAIN = 32  # keys: a multiple of what any product and any loop over weights takes at a time


class Room(NamedTuple):
    """Addresses, and sizes that follow from the call.

    Fields:
      config: of AMX's registers.
      zeros: a row of the cache that holds nothing.
      keys, values: addresses, one for each key of the tile; `shown`: whether any row sees it.
      key_panels, value_panels: the tile's.
      logits, weights: those of a block of rows.
      queries, sums: those of the item. highest, totals: of each row, and LANES of each row.
      end: what lies behind it all.
      query_bytes, sum_bytes: of a row.
      key_panel_bytes, value_panel_bytes: of a panel.
      sum_columns: of a row.
    """

    config: int
    zeros: int
    keys: int
    values: int
    shown: int
    key_panels: int
    value_panels: int
    logits: int
    weights: int
    queries: int
    sums: int
    highest: int
    totals: int
    end: int
    query_bytes: int
    sum_bytes: int
    key_panel_bytes: int
    value_panel_bytes: int
    sum_columns: int


@fast
def up_to(number, step):
    """The least multiple of a step that is not below a number."""
    return -(-number // step) * step


@fast
def row_bytes(args, dtypes):
    """Those of a row of queries and of one of sums."""
    query = up_to(args.head_dim, depth(dtypes)) * size(dtypes)
    return query, 4 * up_to(args.value_dim, columns(dtypes))


@fast
def room_of(args, dtypes, rows, address):
    """The room for a number of rows, from an address on, a multiple of APART."""
    query_bytes, sum_bytes = row_bytes(args, dtypes)
    rows, number = up_to(rows, block(dtypes)), size(dtypes)
    key_panel_bytes, value_panel_bytes = query_bytes // 4 * LINE, KEYS * number // 4 * LINE
    config = address
    zeros = config + up_to(amx.CONFIG_BYTES, APART)
    keys = zeros + up_to(max(args.head_dim, args.value_dim) * args.cache_itemsize, APART)
    values = keys + 8 * KEYS
    shown = values + 8 * KEYS
    key_panels = shown + 4 * KEYS
    value_panels = key_panels + KEYS // PANEL * key_panel_bytes
    logits = value_panels + sum_bytes // LINE * value_panel_bytes
    weights = logits + 4 * KEYS * block(dtypes)
    queries = weights + number * KEYS * block(dtypes)
    sums = queries + up_to(rows * query_bytes, APART)
    highest = sums + up_to(rows * sum_bytes, APART)
    totals = highest + up_to(4 * rows, APART)
    end = totals + up_to(rows * SLAB, APART)
    return Room(
        config,
        zeros,
        keys,
        values,
        shown,
        key_panels,
        value_panels,
        logits,
        weights,
        queries,
        sums,
        highest,
        totals,
        end,
        query_bytes,
        sum_bytes,
        key_panel_bytes,
        value_panel_bytes,
        sum_bytes // 4,
    )

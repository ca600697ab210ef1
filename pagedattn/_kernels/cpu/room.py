"""The scratch of a work item of short queries."""

from typing import NamedTuple

from .compiling import fast
from .simd import LINE
from .softmax import CHUNK
from .unpack import is_packed, scales_logits, up_to
from .unpack_chunk import packed_room

FOLLOWING = 8 * CHUNK  # bytes from a chunk's offsets to those of the next one


class Room(NamedTuple):
    """Addresses, and sizes that follow from the call.

    Fields:
      keys, values, slots: byte offsets of a chunk's keys and values, and the numbers of their
        slots' first heads; FOLLOWING bytes further those of the next chunk.
      shown: whether any row sees a key; `shown_values`: the offsets of values, where one does.
      zeros: a row of a value that no row sees.
      logits: `[heads, rows, CHUNK]`, which become weights.
      kept: by what the sums of a KV head's rows shrink.
      key_scales: per-token scales of keys, `[heads, CHUNK]`. For int4 what `packed_room` describes:
        offsets of unpacked rows, and behind them the rows.
      value_scales: those of values.
      end: what lies behind it all.
      rows: of a KV head; `head_bytes`: of its logits.
    """

    keys: int
    values: int
    slots: int
    shown: int
    shown_values: int
    zeros: int
    logits: int
    kept: int
    key_scales: int
    value_scales: int
    end: int
    rows: int
    head_bytes: int


@fast
def room_of(args, held, rows, heads, address):
    """The room for a number of rows of some KV heads, from an address on."""
    values, slots = address + 2 * FOLLOWING, address + 4 * FOLLOWING
    shown = slots + 2 * FOLLOWING
    shown_values = shown + 4 * CHUNK
    zeros = shown_values + 8 * CHUNK
    logits, head_bytes = zeros + args.row_bytes, 4 * CHUNK * rows
    kept = logits + heads * head_bytes
    key_scales = kept + up_to(4 * rows, LINE)
    value_scales = end = key_scales
    if scales_logits(held):
        value_scales = key_scales + 4 * CHUNK * heads
        end = value_scales + 4 * CHUNK * heads
    if is_packed(held):
        end += packed_room(args)
    places = shown, shown_values, zeros, logits, kept, key_scales, value_scales
    return Room(address, values, slots, *places, end, rows, head_bytes)


@fast
def room_bytes(args, held, rows):
    """The most that a work item of a number of rows of a KV head needs."""
    return room_of(args, held, rows, args.num_kv_heads, 0).end

"""What threads do with a call: claim its work items, and write the rows that they finish."""

import numpy as np

from .call_args import APART, WORK_ITEM, args_at, offset, work_item_at
from .compiling import fast, within
from .memory import (
    add_at,
    aligned_alloc,
    atomic_at,
    call_3_at,
    free,
    get_float32,
    give_way,
    put_float32,
)
from .online_softmax import State, attend, factor, load_queries
from .prefill.items import ROWS_TOGETHER
from .prefill.room import room_bytes as room_bytes_of_head
from .room import room_bytes
from .scalar_math import exp, log
from .softmax import NONE, ZERO
from .store_row import narrow_row
from .unpack import multiplies_int4_keys

WORK_ITEM_BYTES = WORK_ITEM.itemsize
USERS, CLAIMED, DONE = map(offset, ("users", "claimed", "done"))


@within
def work(address, dtypes, tiles, held):
    """Works on items until none is left to begin."""
    args = args_at(address)
    scratch = 0
    number = add_at(address + CLAIMED, 1)
    while number < args.num_items:
        if scratch == 0:
            scratch = aligned_alloc(APART, scratch_bytes(args, tiles, held))
        at = args.first_item + number * WORK_ITEM_BYTES
        if work_item_at(at).is_tile != 0:
            call_3_at(args.prefill, address, at, scratch)
        else:
            run_item(args, dtypes, held, at, scratch)
        add_at(address + DONE, 1)
        number = add_at(address + CLAIMED, 1)
    if scratch != 0:
        free(scratch)


@fast
def leave(address):
    """Frees the arguments if nobody else may look at it any more."""
    if add_at(address + USERS, -1) == 1:
        free(address)


@fast
def end(address):
    """Waits for the work items that other threads have begun, and leaves the call."""
    args = args_at(address)
    while atomic_at(address + DONE) < args.num_items:
        give_way()
    leave(address)


@fast
def scratch_bytes(args, tiles, held):
    """Queries, a state, and what `attend` needs, for the most rows that a work item has."""
    room = room_bytes(args, held, args.rows // args.num_kv_heads)
    short = 2 * args.state_bytes + APART * -(-room // APART)
    if args.tile_tokens == 0:
        return short
    rows = args.tile_tokens * args.group
    few = args.tile_heads * room_bytes_of_head(args, tiles, held, min(rows, ROWS_TOGETHER))
    return max(short, few, room_bytes_of_head(args, tiles, held, rows))


@within
def run_item(args, dtypes, held, at, scratch):
    work_item = work_item_at(at)
    rows = work_item.num_queries * work_item.num_heads * args.group
    state = work_item.state if work_item.parts > 1 else scratch + args.state_bytes
    clear(args, rows, state)
    if work_item.first < work_item.last:
        if multiplies_int4_keys(args, held):
            load_queries(args, held, work_item, scratch)
        else:
            load_queries(args, dtypes, work_item, scratch)
        highest = state + rows * args.row_bytes
        own = State(state, highest, highest + 4 * rows)
        attend(args, dtypes, held, work_item, scratch, own, scratch + 2 * args.state_bytes)
    if work_item.parts == 1:
        finish(args, dtypes, work_item, rows, state)
    elif add_at(work_item.finished, 1) == work_item.parts - 1:
        finish(args, dtypes, work_item, rows, work_item.finished + APART)


@fast
def clear(args, rows, state):
    """A state that has seen no key: `[rows, row]` sums, then highest logits, then totals."""
    row = args.row_bytes // 4
    for i in range(rows * row):
        put_float32(state, i, ZERO)
    for i in range(rows):
        put_float32(state, rows * row + i, NONE)
        put_float32(state, rows * (row + 1) + i, ZERO)


@fast
def finish(args, dtypes, work_item, rows, states):
    """Joins the states of a sequence's work items, in their order, and writes its rows."""
    row, group = 0, args.group
    for kv_head in range(work_item.kv_head, work_item.kv_head + work_item.num_heads):
        unit = args.unit * factor(args.value_scale, args.value_scale_head, kv_head)
        for i in range(work_item.num_queries):
            for head in range(kv_head * group, (kv_head + 1) * group):
                index = (work_item.token + i) * args.num_kv_heads * group + head
                write_row(args, dtypes, work_item.parts, rows, row, states, index, unit)
                row += 1


@fast
def write_row(args, dtypes, parts, rows, row, states, index, unit):
    """The row `index` of out and lse; `unit` is a factor on its values."""
    width = args.row_bytes // 4
    tops, totals = rows * width + row, rows * (width + 1) + row
    top, total = NONE, ZERO
    for part in range(parts):
        top = max(top, get_float32(states + part * args.state_bytes, tops))
    shift = ZERO if top == NONE else top
    if parts == 1:
        total = get_float32(states, totals)
    else:
        for part in range(parts):
            state = states + part * args.state_bytes
            total += get_float32(state, totals) * exp(get_float32(state, tops) - shift)
        join_sums(args, parts, row, states, tops, shift)
    over = ZERO if total == ZERO else np.float32(1) / total
    out = args.out + index * args.value_dim * args.itemsize
    narrow_row(states + row * args.row_bytes, over * unit, out, args.value_dim, dtypes)
    if args.lse != 0:
        put_float32(args.lse, index, NONE if total == ZERO else shift + log(total))


@fast
def join_sums(args, parts, row, states, tops, shift):
    """Adds a row's sums of all parts up in the first one's."""
    sums = states + row * args.row_bytes
    factor = exp(get_float32(states, tops) - shift)
    for d in range(args.value_dim):
        put_float32(sums, d, get_float32(sums, d) * factor)
    for part in range(1, parts):
        state = states + part * args.state_bytes
        factor, other = exp(get_float32(state, tops) - shift), state + row * args.row_bytes
        for d in range(args.value_dim):
            put_float32(sums, d, get_float32(sums, d) + get_float32(other, d) * factor)

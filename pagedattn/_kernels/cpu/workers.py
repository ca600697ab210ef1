"""What threads do with a job: claim its pieces, and write the rows of a sequence that they end."""

import numpy as np

from .call_args import APART, PIECE, job_at, offset, piece_at
from .compiling import fast, within
from .memory import add_at, aligned_alloc, atomic_at, free, get_float32, give_way, put_float32
from .online_softmax import attend, factor, load_queries, room_bytes
from .scalar_math import exp, log
from .softmax import NONE, ZERO
from .store_row import narrow_row

PIECE_BYTES = PIECE.itemsize
USERS, CLAIMED, DONE = map(offset, ("users", "claimed", "done"))


@within
def work(address, kinds):
    """Works on pieces until none is left to begin."""
    job = job_at(address)
    scratch = 0
    number = add_at(address + CLAIMED, 1)
    while number < job.num_pieces:
        if scratch == 0:
            scratch = aligned_alloc(APART, scratch_bytes(job))
        do_piece(job, kinds, job.pieces + number * PIECE_BYTES, scratch)
        add_at(address + DONE, 1)
        number = add_at(address + CLAIMED, 1)
    if scratch != 0:
        free(scratch)


@fast
def leave(address):
    """Frees the job if nobody else may look at it any more."""
    if add_at(address + USERS, -1) == 1:
        free(address)


@fast
def end(address):
    """Waits for the pieces that other threads have begun, and leaves the job."""
    job = job_at(address)
    while atomic_at(address + DONE) < job.num_pieces:
        give_way()
    leave(address)


@fast
def scratch_bytes(job):
    """Queries, a state, and what `attend` needs, for the most rows that a piece has."""
    room = room_bytes(job, job.rows // job.num_kv_heads)
    return 2 * job.state_bytes + APART * -(-room // APART)


@within
def do_piece(job, kinds, at, scratch):
    piece = piece_at(at)
    rows = piece.num_queries * job.num_kv_heads * job.group
    state = piece.state if piece.parts > 1 else scratch + job.state_bytes
    clear(job, rows, state)
    if piece.first < piece.last:
        load_queries(job, kinds, piece, scratch)
        highest = state + rows * job.row_bytes
        room = scratch + 2 * job.state_bytes
        attend(job, kinds, piece, scratch, state, highest, highest + 4 * rows, room)
    if piece.parts == 1:
        finish(job, kinds, piece, rows, state)
    elif add_at(piece.finished, 1) == piece.parts - 1:
        finish(job, kinds, piece, rows, piece.finished + APART)


@fast
def clear(job, rows, state):
    """A state that has seen no key: `[rows, row]` sums, then highest logits, then totals."""
    row = job.row_bytes // 4
    for i in range(rows * row):
        put_float32(state, i, ZERO)
    for i in range(rows):
        put_float32(state, rows * row + i, NONE)
        put_float32(state, rows * (row + 1) + i, ZERO)


@fast
def finish(job, kinds, piece, rows, states):
    """Joins the states of a sequence's pieces, in their order, and writes its rows."""
    row, group = 0, job.group
    for kv_head in range(job.num_kv_heads):
        unit = job.unit * factor(job.value_scale, job.value_scale_head, kv_head)
        for i in range(piece.num_queries):
            for head in range(kv_head * group, (kv_head + 1) * group):
                index = (piece.token + i) * job.num_kv_heads * group + head
                write_row(job, kinds, piece.parts, rows, row, states, index, unit)
                row += 1


@fast
def write_row(job, kinds, parts, rows, row, states, index, unit):
    """The row `index` of out and lse; `unit` is a factor on its values."""
    width = job.row_bytes // 4
    tops, totals = rows * width + row, rows * (width + 1) + row
    top, total = NONE, ZERO
    for part in range(parts):
        top = max(top, get_float32(states + part * job.state_bytes, tops))
    shift = ZERO if top == NONE else top
    if parts == 1:
        total = get_float32(states, totals)
    else:
        for part in range(parts):
            state = states + part * job.state_bytes
            total += get_float32(state, totals) * exp(get_float32(state, tops) - shift)
        join_sums(job, parts, row, states, tops, shift)
    over = ZERO if total == ZERO else np.float32(1) / total
    out = job.out + index * job.value_dim * job.itemsize
    narrow_row(states + row * job.row_bytes, over * unit, out, job.value_dim, kinds)
    if job.lse != 0:
        put_float32(job.lse, index, NONE if total == ZERO else shift + log(total))


@fast
def join_sums(job, parts, row, states, tops, shift):
    """Adds a row's sums of all parts up in the first one's."""
    sums = states + row * job.row_bytes
    factor = exp(get_float32(states, tops) - shift)
    for d in range(job.value_dim):
        put_float32(sums, d, get_float32(sums, d) * factor)
    for part in range(1, parts):
        state = states + part * job.state_bytes
        factor, other = exp(get_float32(state, tops) - shift), state + row * job.row_bytes
        for d in range(job.value_dim):
            put_float32(sums, d, get_float32(sums, d) + get_float32(other, d) * factor)

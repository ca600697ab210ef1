"""The sum of what two GPUs have, by one kernel on each that writes into the other's memory.

A device pushes its rows into its peer's memory, and waits until the peer's are in its own. What is
not there yet reads as `EMPTY`, which no device pushes: data are their own flags, and no row waits
for a fence and a flag behind it. A row is one program's on either device, which waits for that row
of the peer and nothing else. The memory of a device, in words of 32 bits:

    [rows]            the part of the next dimension in which the row was last
    [3, rows, words]  the peer's rows, in three parts by turns

A program that has read a row empties the part that was in use before, whose row is read by then.
The peer writes there in the second turn from now on, after it has seen this device's row of the
next turn, which this device pushes after that.
"""

import triton
import triton.language as tl


@triton.jit
def sum_kernel(
    partial,  # [PARTS, num_rows, COLUMNS]: this device's, in parts to be added too
    addresses,  # i32 [4]: of this device's memory and of its peer's, the low halves first
    memory,  # is read by its address: named here to live as long as the call
    total,  # [num_rows, COLUMNS]
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,  # COLUMNS padded to a power of two
    ROWS: tl.constexpr,  # of the memory
    WORDS: tl.constexpr,  # of a row of the memory
    EMPTY: tl.constexpr,  # as i32; its halves are alike
):
    row, columns = tl.program_id(0), tl.arange(0, PADDED)
    inside = columns < COLUMNS
    at = row.to(tl.int64) * COLUMNS + columns
    own = _row(partial, at, inside, PARTS, COLUMNS).to(total.dtype.element_ty)
    theirs = _exchanged(own, addresses, row, columns, inside, ROWS, WORDS, EMPTY)
    wide = own.to(tl.float32) + theirs.to(tl.float32)
    tl.store(total + at, wide.to(total.dtype.element_ty), mask=inside)


@triton.jit
def norm_kernel(
    partial,
    residual,  # [num_rows, COLUMNS]
    weight,  # [COLUMNS]
    addresses,
    memory,
    total,  # residual + sum
    normed,  # the RMSNorm of total
    EPS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,  # of a row of the memory
    EMPTY: tl.constexpr,  # as i32; its halves are alike
):
    row, columns = tl.program_id(0), tl.arange(0, PADDED)
    inside = columns < COLUMNS
    at = row.to(tl.int64) * COLUMNS + columns
    own = _row(partial, at, inside, PARTS, COLUMNS).to(total.dtype.element_ty)
    before = tl.load(residual + at, mask=inside, other=0.0)
    scale = tl.load(weight + columns, mask=inside, other=0.0)
    theirs = _exchanged(own, addresses, row, columns, inside, ROWS, WORDS, EMPTY)
    wide = own.to(tl.float32) + theirs.to(tl.float32)
    # Rounded after each step, as where XLA adds.
    wide = before.to(tl.float32) + wide.to(total.dtype.element_ty).to(tl.float32)
    rounded = wide.to(total.dtype.element_ty)
    tl.store(total + at, rounded, mask=inside)
    wide = rounded.to(tl.float32)
    mean = tl.sum(wide * wide, 0) / COLUMNS
    out = scale.to(tl.float32) * (wide * tl.rsqrt(mean + EPS))
    tl.store(normed + at, out.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _row(partial, at, inside, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    own = tl.load(partial + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        other = partial + part * tl.num_programs(0).to(tl.int64) * COLUMNS + at
        own += tl.load(other, mask=inside, other=0.0).to(tl.float32)
    return own


@triton.jit
def _exchanged(
    own,
    addresses,
    row,
    columns,
    inside,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    EMPTY: tl.constexpr,
):
    """The peer's row for this one."""
    both = addresses.to(tl.pointer_type(tl.int64))
    here, there = tl.load(both), tl.load(both + 1)
    last = here.to(tl.pointer_type(tl.int32)) + row
    before = tl.load(last)
    turn = (before + 1) % 3
    kind = tl.pointer_type(own.dtype)
    offset = _offset(turn, row, ROWS, WORDS)
    pushed = tl.multiple_of((there + offset).to(kind), 16)
    received = tl.multiple_of((here + offset).to(kind), 16)
    some = tl.where(_is_empty(own, EMPTY), 0.0, own).to(own.dtype)
    tl.store(pushed + columns, some, mask=inside)
    theirs = tl.load(received + columns, mask=inside, other=0.0, volatile=True)
    while tl.max(_is_empty(theirs, EMPTY).to(tl.int32), 0) > 0:
        theirs = tl.load(received + columns, mask=inside, other=0.0, volatile=True)
    _empty(here + _offset(before, row, ROWS, WORDS), WORDS, EMPTY)
    tl.store(last, turn)
    return theirs


@triton.jit
def _offset(turn, row, ROWS: tl.constexpr, WORDS: tl.constexpr):
    return 4 * (ROWS + (turn * ROWS + row).to(tl.int64) * WORDS)


@triton.jit
def _is_empty(values, EMPTY: tl.constexpr):
    if values.dtype == tl.float32:
        empty = values.to(tl.int32, bitcast=True) == EMPTY
    else:
        empty = values.to(tl.int16, bitcast=True) == (EMPTY >> 16)
    return empty


@triton.jit
def _empty(address, WORDS: tl.constexpr, EMPTY: tl.constexpr):
    """All of a row, however little of it was used: the next one may be of another dtype."""
    words = tl.arange(0, triton.next_power_of_2(WORDS))
    start = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    tl.store(start + words, tl.full(words.shape, EMPTY, tl.int32), mask=words < WORDS)

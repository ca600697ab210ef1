"""The sum of what two GPUs have, by one kernel on each that writes into the other's memory.

A device pushes its rows into its peer's memory and raises a flag there for each; it waits for its
own flags, and adds what has come. A row is one program's on either device, which waits for that
row of the peer and nothing else. The memory of a device:

    int32 [rows]                  flags: the last epoch of which the peer's row is here
    int32 [rows]                  epochs: how often this device has added the row
    bytes [2, rows, row_bytes]    the peer's rows; those of odd epochs in the second half

Two halves are enough: a peer pushes epoch n + 2 after it has seen this device's flag of n + 1,
which this device raises after it has read epoch n.
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
    ROW_BYTES: tl.constexpr,
):
    row, columns = tl.program_id(0), tl.arange(0, PADDED)
    inside = columns < COLUMNS
    at = row.to(tl.int64) * COLUMNS + columns
    own = _row(partial, at, inside, PARTS, COLUMNS).to(total.dtype.element_ty)
    theirs = _exchanged(own, addresses, row, columns, inside, ROWS, ROW_BYTES)
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
    ROW_BYTES: tl.constexpr,
):
    row, columns = tl.program_id(0), tl.arange(0, PADDED)
    inside = columns < COLUMNS
    at = row.to(tl.int64) * COLUMNS + columns
    own = _row(partial, at, inside, PARTS, COLUMNS).to(total.dtype.element_ty)
    before = tl.load(residual + at, mask=inside, other=0.0)
    scale = tl.load(weight + columns, mask=inside, other=0.0)
    theirs = _exchanged(own, addresses, row, columns, inside, ROWS, ROW_BYTES)
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
def _exchanged(own, addresses, row, columns, inside, ROWS: tl.constexpr, ROW_BYTES: tl.constexpr):
    """The peer's row for this one."""
    both = addresses.to(tl.pointer_type(tl.int64))
    here, there = tl.load(both), tl.load(both + 1)
    flags, flags_there = here.to(tl.pointer_type(tl.int32)), there.to(tl.pointer_type(tl.int32))
    epoch = tl.load(flags + ROWS + row) + 1
    offset = 8 * ROWS + ((epoch & 1) * ROWS + row) * ROW_BYTES
    kind = tl.pointer_type(own.dtype)
    # In the peer's memory, and in this device's.
    pushed = tl.multiple_of((there + offset).to(kind), 16)
    received = tl.multiple_of((here + offset).to(kind), 16)
    tl.store(pushed + columns, own, mask=inside)
    tl.debug_barrier()  # the row is all threads', its flag one thread's
    tl.atomic_xchg(flags_there + row, epoch, sem="release", scope="sys")
    # The difference, for numbers of epochs wrap. The peer may be one epoch ahead.
    while tl.atomic_add(flags + row, 0, sem="acquire", scope="sys") - epoch < 0:
        pass
    tl.store(flags + ROWS + row, epoch)
    return tl.load(received + columns, mask=inside, other=0.0, cache_modifier=".cg")

"""The online softmax's states: of nothing, two joined, and what a state finally gives.

Written out in fused operations, so that programs that are compiled apart give the same bits.
"""

# Constants are NamedTuples here, which the type `constexpr` does not say.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from .online_softmax import State

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
ONE = tl.constexpr(1.0)


@triton.jit
def nothing_seen(ROWS: tl.constexpr):
    return tl.full([ROWS], float("-inf"), tl.float32)


@triton.jit
def empty_state(config: tl.constexpr, tile: tl.constexpr):
    """The state before any key."""
    ROWS: tl.constexpr = tile.rows
    PARTS: tl.constexpr = config.layout.sums
    total = tl.zeros([ROWS], tl.float32)
    nothing = tl.zeros([ROWS, config.widths.value_dims // PARTS], tl.float32)
    sums = (nothing,)
    for _ in tl.static_range(PARTS - 1):
        sums = sums + (nothing,)  # noqa: RUF005  (Triton has no other way)
    return State(highest=nothing_seen(ROWS), total=total, sums=sums)


@triton.jit
def join_states(before, after, ALIBI: tl.constexpr):
    """The state of the keys of both. One without keys changes no bit of the other."""
    exponent: tl.constexpr = LOG2E if ALIBI else ONE
    highest = tl.maximum(before.highest, after.highest)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    old = tl.exp2((before.highest - shift) * exponent)
    new = tl.exp2((after.highest - shift) * exponent)
    total = tl.fma(after.total, new, before.total * old)
    SUMS: tl.constexpr = len(before.sums)
    sums = ()
    for i in tl.static_range(SUMS):
        sums = sums + (joined_columns(before.sums[i], after.sums[i], old, new),)  # noqa: RUF005
    return State(highest=highest, total=total, sums=sums)


@triton.jit
def joined_columns(before, after, old, new):
    old = tl.broadcast_to(old[:, None], before.shape)
    new = tl.broadcast_to(new[:, None], after.shape)
    return tl.fma(after, new, before * old)


@triton.jit
def finished(highest, total, ALIBI: tl.constexpr):
    """What sums are divided by, and the log-sum-exp."""
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    # Without ALiBi the logits are in base 2: see `Formula`.
    log_total = highest + tl.log(total) if ALIBI else (highest + tl.log2(total)) * LN2
    return total, tl.where(empty, float("-inf"), log_total)


@triton.jit
def columns_of(state, config: tl.constexpr, tile: tl.constexpr):
    """What is summed up, all columns in order."""
    ROWS: tl.constexpr = tile.rows
    COLUMNS: tl.constexpr = config.widths.value_dims
    sums = state.sums
    if config.layout.nibbles:
        low = tl.reshape(tl.join(sums[0], sums[1]), [ROWS, COLUMNS // 2])
        high = tl.reshape(tl.join(sums[2], sums[3]), [ROWS, COLUMNS // 2])
        columns = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [ROWS, COLUMNS])
    elif config.layout.pairs:
        columns = tl.reshape(tl.join(sums[0], sums[1]), [ROWS, COLUMNS])
    else:
        columns = sums[0]
    return columns

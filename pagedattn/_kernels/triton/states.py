"""The online softmax's states: two joined, and what a state finally gives.

Written out in fused operations, so that programs that are compiled apart give the same bits.
"""

import triton
import triton.language as tl

from .online_softmax import State

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
ONE = tl.constexpr(1.0)


@triton.jit
def join_states(before, after, ALIBI: tl.constexpr, PAIRS: tl.constexpr):
    """The state of the keys of both. One without keys changes no bit of the other."""
    exponent: tl.constexpr = LOG2E if ALIBI else ONE
    highest = tl.maximum(before.highest, after.highest)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    old = tl.exp2((before.highest - shift) * exponent)
    new = tl.exp2((after.highest - shift) * exponent)
    total = tl.fma(after.total, new, before.total * old)
    summed = joined_columns(before.summed, after.summed, old, new)
    odd = summed
    if PAIRS:
        odd = joined_columns(before.odd, after.odd, old, new)
    return State(highest=highest, total=total, summed=summed, odd=odd)


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

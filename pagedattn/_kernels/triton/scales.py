"""Scales of heads, of tokens, and in four bits those of a token's groups of columns.

A head's scales are factors on all logits and on all that is summed. A key's scale is a factor on
its column of the products, a value's scale one on its column of the weights. The numbers of a group
are multiplied by its scale in registers.
"""

# Constants are NamedTuples here, which the type `constexpr` does not say.
# pyright: reportAttributeAccessIssue=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
BITS, BIAS = tl.constexpr(23), tl.constexpr(127)  # of float32, behind its exponent and in it


class Scales(NamedTuple):
    """Those of a step, `[keys]`."""

    key: Any
    value: Any
    log: Any  # of a number not below that of the value, as the logits are: see `Formula`


@triton.jit
def head_scale(scales, stride, kv_head):
    """That of a KV head: of one for each, of one number (stride 0), or 1 (stride -1)."""
    return tl.load(scales + kv_head * stride, mask=stride >= 0, other=1)


@triton.jit
def load_scales(cache, slots, config: tl.constexpr, MASKED: tl.constexpr):
    """The scales of a step, if each token has one for its key and one for its value."""
    if config.layout.scaled:
        at = row_of(cache, slots, config)
        key = load_numbers(cache.key_scale + at, slots.inside, MASKED)
        value = key
        if not config.widths.latent:
            value = load_numbers(cache.value_scale + at, slots.inside, MASKED)
        log = exponent_above(value)
        if config.options.alibi:
            log *= LN2
        scales = Scales(key=key, value=value, log=log)
    else:
        scales = ()
    return scales


@triton.jit
def exponent_above(scale):
    """The exponent of a power of two above a scale; `tl.log2` is a polynomial."""
    return ((scale.to(tl.int32, bitcast=True) >> BITS) - (BIAS - 1)).to(tl.float32)


@triton.jit
def row_of(cache, slots, config: tl.constexpr):
    """The row of each key, and of its value, in arrays that lie as `[slots, heads, ...]`."""
    slot = slots.blocks * config.layout.block_size + slots.slots
    return slot * cache.num_kv_heads + cache.kv_head


@triton.jit
def load_numbers(pointers, inside, MASKED: tl.constexpr):
    """Scales; 1 for keys that are not to be read."""
    if MASKED:
        return tl.load(pointers, mask=inside, other=1.0)
    return tl.load(pointers)


@triton.jit
def load_groups(
    scales, rows, inside, FIRST: tl.constexpr, WIDTH: tl.constexpr, HELD: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`[keys, WIDTH]`: the scale of every HELD-th column of a half of the row, from FIRST on.

    Nothing but loads and broadcasts, through which the compiler finds the threads that need them.
    """
    HALF: tl.constexpr = GROUP * GROUPS // 2
    PIECE: tl.constexpr = GROUP if HALF % GROUP == 0 else HALF & -HALF  # of one group each
    PIECES: tl.constexpr = WIDTH * HELD // PIECE
    groups = tl.arange(0, PIECES)
    if PIECE == GROUP:
        groups += FIRST // GROUP
    else:
        groups = (FIRST + groups * PIECE) // GROUP
    if PIECES * PIECE > HALF:
        groups = tl.minimum(groups, GROUPS - 1)  # beyond are columns of padding
    pointers = scales + rows[:, None] * GROUPS + groups[None, :]
    pieces = load_numbers(pointers, inside[:, None], MASKED)
    KEYS: tl.constexpr = pieces.shape[0]
    spread = tl.broadcast_to(pieces[:, :, None], [KEYS, PIECES, PIECE // HELD])
    return tl.reshape(spread, [KEYS, WIDTH])

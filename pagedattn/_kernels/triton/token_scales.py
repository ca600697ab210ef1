"""Scales of tokens: one of each key and of each value, and of four bits one of each group of columns.

A key's scale is a factor on its column of the products, a value's scale on its column of the
weights. Of several groups those factors are powers of two, near the largest scale; what is left of
each group's scale is a float16 near 1 or below, with which the numbers are multiplied in registers.
"""

# Constants are NamedTuples here, which the type `constexpr` does not say.
# pyright: reportAttributeAccessIssue=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LEAST = tl.constexpr(2.0**-120)  # has a logarithm, which 0 has not


class Scales(NamedTuple):
    """Those of a step, `[keys]`."""

    key: Any
    value: Any
    log: Any  # of that of the value, as the logits are: see `Formula`
    key_groups: Any  # what is left of each group's scale
    value_groups: Any


@triton.jit
def load_scales(cache, slots, config: tl.constexpr, MASKED: tl.constexpr):
    """The scales of a step, if tokens have any."""
    if config.layout.scaled:
        scales = load_all(cache, slots, config, MASKED)
    else:
        scales = ()
    return scales


@triton.jit
def load_all(cache, slots, config: tl.constexpr, MASKED: tl.constexpr):
    layout: tl.constexpr = config.layout
    at = (slots.blocks * layout.block_size + slots.slots) * cache.num_kv_heads + cache.kv_head
    inside = slots.inside
    key_groups, value_groups = (), ()
    if layout.nibbles:
        key, key_groups = load_groups(cache.key_scale, at, inside, layout.key_groups, MASKED)
        value, value_groups = load_groups(
            cache.value_scale, at, inside, layout.value_groups, MASKED
        )
    else:
        key = load_numbers(cache.key_scale, at, inside, 1.0, MASKED)
        value = key
        if not config.widths.latent:
            value = load_numbers(cache.value_scale, at, inside, 1.0, MASKED)
    log = tl.log2(tl.maximum(value, LEAST))
    if config.options.alibi:
        log *= LN2
    return Scales(
        key=key, value=value, log=log, key_groups=key_groups, value_groups=value_groups
    )


@triton.jit
def load_numbers(array, at, inside, OTHER: tl.constexpr, MASKED: tl.constexpr):
    """Numbers of an array; of keys that are not to be read another one."""
    if MASKED:
        return tl.load(array + at, mask=inside, other=OTHER)
    return tl.load(array + at)


@triton.jit
def load_groups(array, at, inside, GROUPS: tl.constexpr, MASKED: tl.constexpr):
    """The factor of each key, and what is left of the scale of each of its groups.

    Scales are read several at a time: a load of less than four bytes would not be under way while
    others are.
    """
    if GROUPS % 4 == 0:
        EACH: tl.constexpr = 4
        WORD: tl.constexpr = tl.uint64
        ONES: tl.constexpr = 0x3C003C003C003C00
    elif GROUPS % 2 == 0:
        EACH: tl.constexpr = 2
        WORD: tl.constexpr = tl.uint32
        ONES: tl.constexpr = 0x3C003C00
    else:
        EACH: tl.constexpr = 1
        WORD: tl.constexpr = tl.uint16
        ONES: tl.constexpr = 0x3C00
    words = array.to(tl.pointer_type(WORD))
    scales = ()
    for i in tl.static_range(GROUPS // EACH):
        word = load_numbers(words, at * (GROUPS // EACH) + i, inside, ONES, MASKED)
        for j in tl.static_range(EACH):
            bits = ((word >> (16 * j)) & 0xFFFF).to(tl.uint16)
            scales = scales + (bits.to(tl.float16, bitcast=True),)  # noqa: RUF005
    largest = scales[0]
    for i in tl.static_range(1, GROUPS):
        largest = tl.maximum(largest, scales[i])
    # A float16 without its mantissa.
    unit = (largest.to(tl.uint16, bitcast=True) & 0x7C00).to(tl.float16, bitcast=True)
    unit = tl.maximum(unit.to(tl.float32), 2.0**-14)
    left = ()
    for i in tl.static_range(GROUPS):
        left = left + ((scales[i].to(tl.float32) / unit).to(tl.float16),)  # noqa: RUF005
    return unit, left


@triton.jit
def of_columns(
    groups, FIRST: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr
):
    """`[keys, WIDTH]`: what is left of the scales, for every STEP-th column from FIRST on."""
    columns = FIRST + STEP * tl.arange(0, WIDTH)[None, :]
    KEYS: tl.constexpr = groups[0].shape[0]
    GROUPS: tl.constexpr = len(groups)
    spread = tl.broadcast_to(groups[FIRST // GROUP][:, None], [KEYS, WIDTH])
    for i in tl.static_range(FIRST // GROUP + 1, GROUPS):
        if i * GROUP < FIRST + STEP * WIDTH:
            spread = tl.where(columns >= i * GROUP, groups[i][:, None], spread)
    return spread

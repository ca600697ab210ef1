"""The warpgroup that widens keys and values of eight bits to what the matrix unit takes.

TMA loads them as they are held; this warpgroup makes float16 of them, in shared memory, for the
warpgroups that multiply.
"""

from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ..ring import Ring
from .float16 import float16_of
from .kernel_config import KernelConfig
from .registers import NUMBERS, load, store
from .registers import wide as wide_rows
from .token_scales import LEAST, Scales, blocks_of, exponents_of, scales_at, tokens_of

REGISTERS = 72  # of a thread: room for what is loaded at once


class HeldMemory(NamedTuple):
    """What is loaded, in a multiprocessor's memory."""

    key: Any
    value: Any
    value_rows: Any


class HeldBarriers(NamedTuple):
    key_full: Any
    key_free: Any
    value_full: Any
    value_free: Any


def widen(config: KernelConfig, arrays, held, memory, barriers, schedule):
    """Fills the rings of those that multiply, in the order in which pages are loaded.

    `held` are the memory and the barriers of what is loaded.
    """
    plgpu.set_max_registers(REGISTERS, action="decrease")
    rows, (loaded, signals) = memory.scales, held
    keys = Ring(loaded.key, signals.key_full, signals.key_free)
    wide_keys = Ring(memory.key, barriers.key_full, barriers.key_free)
    values = Ring(loaded.value, signals.value_full, signals.value_free)
    wide_values = Ring(memory.value, barriers.value_full, barriers.value_free)

    def keys_of(task, step, scales, before):
        """The scales of the step's values, and the exponent that they leave out."""
        position = task.done + step
        if scales is None:
            numbers = take(keys, position)
            put(wide_keys, wide_keys.free_slot(position), numbers)
            return None, before
        rows.key[...], rows.value[...] = scales
        numbers = take(keys, position)  # and commits the scales, which other warps read
        exponents = exponents_of(config, rows, before)
        slot = wide_keys.free_slot(position)
        for place, exponent in zip(rows.places(slot), exponents, strict=True):
            store(rows.exponents.at[place], exponent)
        put(wide_keys, slot, numbers, factors(rows.key, exponents.key))
        return scales.value, exponents.value

    def values_of(task, step, scales, exponent):
        position = task.done + step
        if scales is None:
            numbers = take(values, position)
            put(wide_values, wide_values.free_slot(position), numbers)
            return
        rows.value[...] = scales
        numbers = take(values, position)
        slot = wide_values.free_slot(position)
        put(wide_values, slot, numbers, factors(rows.value, exponent))

    def widen_tile(task, following, has_next, started):
        def look_up(step):
            """The blocks of a step's tokens."""
            if not config.token_scales:
                return None
            tokens = tokens_of(config, task, step)
            return blocks_of(config, arrays.tables, task.tile.sequence, tokens)

        def found(step, blocks):
            if blocks is None:
                return None
            tokens = tokens_of(config, task, step)
            scales = (scales_at(config, s, task.head, tokens, blocks) for s in arrays.scales)
            return Scales(*scales)

        def step_of_both(step, carry):
            """Blocks are looked up two steps ahead, their scales one: each load takes long."""
            *before, scales, blocks = carry
            ahead, blocks = found(step + 1, blocks), look_up(step + 2)
            new = keys_of(task, step, scales, before[1])
            values_of(task, step - 1, *before)
            return *new, ahead, blocks

        zero, one, two = (jnp.int32(step) for step in range(3))
        blocks = look_up(one), look_up(two)
        new = keys_of(task, zero, found(zero, look_up(zero)), jnp.float32(LEAST))
        carry = *new, found(one, blocks[0]), blocks[1]
        *last, _, _ = lax.fori_loop(1, task.blocks.count, step_of_both, carry)
        values_of(task, task.blocks.count - 1, *last)
        return started

    schedule(lambda task: (), widen_tile)


def factors(row, exponent):
    """The scales of a step's tokens without a power of two, in float16."""
    scales = load(row, NUMBERS.reduce(1)) * jnp.exp2(-exponent)
    return scales.astype(jnp.float16)


def take(held: Ring, step):
    """What is loaded, which makes room for more."""
    slot = held.slot(step)
    plgpu.barrier_wait(held.full.at[slot])
    numbers = load(held.room.at[slot], NUMBERS)
    plgpu.commit_smem()  # all warps have read
    plgpu.barrier_arrive(held.free.at[slot])
    return numbers


def put(wide: Ring, slot, numbers, factors=None):
    """In a slot that is free."""
    wide.room.at[slot][...] = widened(numbers, factors)
    plgpu.commit_smem()
    plgpu.barrier_arrive(wide.full.at[slot])


def widened(numbers, factors):
    numbers = float16_of(numbers)
    if factors is None:
        return numbers
    # JAX 0.10 finds no layout for what is broadcast.
    return numbers * plgpu.layout_cast(wide_rows(factors, numbers), NUMBERS)

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
from .token_scales import (
    LEAST,
    Scales,
    blocks_of,
    exponent_places,
    exponents_of,
    scales_at,
    tokens_of,
)

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


class Rings(NamedTuple):
    """Of keys or values: what is loaded, and what the others multiply."""

    held: Ring
    wide: Ring


class Waiting(NamedTuple):
    """What a step leaves to the next one, behind whose keys its values are widened.

    Fields:
      scales: those of its values; None without per-token scales.
      exponent: of the power of two that these leave out.
    """

    scales: Any
    exponent: Any


def widen(config: KernelConfig, arrays, loaded, memory, barriers, schedule):
    """Fills the rings of those that multiply, in the order in which pages are loaded.

    `loaded` are `HeldMemory` and `HeldBarriers`, which the warpgroup that loads fills.
    """
    plgpu.set_max_registers(REGISTERS, action="decrease")
    held, signals = loaded
    keys = Rings(
        Ring(held.key, signals.key_full, signals.key_free),
        Ring(memory.key, barriers.key_full, barriers.key_free),
    )
    values = Rings(
        Ring(held.value, signals.value_full, signals.value_free),
        Ring(memory.value, barriers.value_full, barriers.value_free),
    )

    def widen_tile(task, following, has_next, started):
        Walk(config, arrays, memory.scales, keys, values, task).widen()
        return started

    schedule(lambda task: (), widen_tile)


class Walk:
    """The steps of one tile."""

    def __init__(self, config, arrays, rows, keys, values, task):
        self.config, self.arrays, self.rows, self.task = config, arrays, rows, task
        self.keys, self.values = keys, values

    def widen(self):
        zero, one, two = (jnp.int32(step) for step in range(3))
        blocks = self.blocks(one), self.blocks(two)
        scales = self.scales(zero, self.blocks(zero))
        waiting = self.widen_keys(zero, scales, jnp.float32(LEAST))
        carry = waiting, self.scales(one, blocks[0]), blocks[1]
        last, _, _ = lax.fori_loop(1, self.task.blocks.count, self.step, carry)
        self.widen_values(self.task.blocks.count - 1, last)

    def step(self, step, carry):
        """Blocks are looked up two steps ahead, their scales one: each load takes long."""
        waiting, scales, blocks = carry
        ahead, blocks = self.scales(step + 1, blocks), self.blocks(step + 2)
        new = self.widen_keys(step, scales, waiting.exponent)
        self.widen_values(step - 1, waiting)
        return new, ahead, blocks

    def blocks(self, step):
        """The blocks of a step's tokens, as far as their scales are needed."""
        if not self.config.token_scales:
            return None
        tokens = tokens_of(self.config, self.task, step)
        return blocks_of(self.config, self.arrays.tables, self.task.tile.sequence, tokens)

    def scales(self, step, blocks):
        """The scales of a step's tokens, in these blocks."""
        if blocks is None:
            return None
        tokens = tokens_of(self.config, self.task, step)
        where = self.task.head, tokens, blocks
        return Scales(*(scales_at(self.config, scales, *where) for scales in self.arrays.scales))

    def widen_keys(self, step, scales, before) -> Waiting:
        """`before` is the exponent of the values so far."""
        position, (held, wide) = self.task.done + step, self.keys
        if scales is None:
            numbers = take(held, position)
            put(wide, wide.free_slot(position), numbers)
            return Waiting(None, before)
        self.rows.key[...], self.rows.value[...] = scales
        numbers = take(held, position)  # and commits the scales, which other warps read
        exponents = exponents_of(self.config, self.rows, before)
        slot = wide.free_slot(position)
        for place, exponent in zip(exponent_places(slot), exponents, strict=True):
            store(self.rows.exponents.at[place], exponent)
        put(wide, slot, numbers, factors(self.rows.key, exponents.key))
        return Waiting(scales.value, exponents.value)

    def widen_values(self, step, waiting: Waiting):
        position, (held, wide) = self.task.done + step, self.values
        if waiting.scales is None:
            numbers = take(held, position)
            put(wide, wide.free_slot(position), numbers)
            return
        self.rows.value[...] = waiting.scales
        numbers = take(held, position)
        slot = wide.free_slot(position)
        put(wide, slot, numbers, factors(self.rows.value, waiting.exponent))


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

"""The warpgroup that widens keys and values of eight bits to what the matrix unit takes.

TMA loads them as they are held; this warpgroup makes float16 of them, in shared memory, for the
warpgroups that multiply. Values with per-token scales become bfloat16, which has their range.
"""

from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ..ring import Ring
from .float16 import float16_of
from .kernel_config import KernelConfig
from .registers import NUMBERS, load
from .registers import wide as wide_rows
from .token_scales import scales_of

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
    loaded, signals = held
    keys = Ring(loaded.key, signals.key_full, signals.key_free)
    wide_keys = Ring(memory.key, barriers.key_full, barriers.key_free)
    values = Ring(loaded.value, signals.value_full, signals.value_free)
    wide_values = Ring(memory.value, barriers.value_full, barriers.value_free)

    def keys_of(task, step, scales):
        target = wide_keys.free_slot(task.done + step)
        if scales is not None:
            memory.scales.at[target][...] = scales.key
        widen_step(keys, wide_keys, task.done + step)

    def values_of(task, step, scales):
        wide_values.free_slot(task.done + step)
        if scales is not None:
            memory.value_scales[...] = scales.value
            plgpu.commit_smem()  # other threads read them
        widen_step(values, wide_values, task.done + step, memory.value_scales)

    def widen_tile(task, following, has_next, started):
        def found(step):
            return scales_of(config, arrays, task, step) if config.token_scales else None

        def step_of_both(step, carry):
            """Scales are looked up a step ahead: two loads, one after the other, take long."""
            before, scales = carry
            ahead = found(step + 1)
            keys_of(task, step, scales)
            values_of(task, step - 1, before)
            return scales, ahead

        first, second = found(jnp.int32(0)), found(jnp.int32(1))
        keys_of(task, jnp.int32(0), first)
        before, _ = lax.fori_loop(1, task.blocks.count, step_of_both, (first, second))
        values_of(task, task.blocks.count - 1, before)
        return started

    schedule(lambda task: (), widen_tile)


def widen_step(held: Ring, wide: Ring, step, scales=None):
    """The keys or the values of a step. There is room for one that is loaded, or in registers."""
    source, target = held.slot(step), wide.slot(step)
    plgpu.barrier_wait(held.full.at[source])
    factor = None if scales is None else load(scales, NUMBERS.reduce(1))
    numbers = load(held.room.at[source], NUMBERS)
    plgpu.commit_smem()  # all warps have read
    plgpu.barrier_arrive(held.free.at[source])
    wide.room.at[target][...] = widened(numbers, factor, wide.room.dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(wide.full.at[target])


def widened(numbers, factor, dtype):
    numbers = float16_of(numbers)
    if factor is None:
        return numbers
    # JAX 0.10 finds no layout for what is broadcast.
    factor = plgpu.layout_cast(wide_rows(factor, numbers), NUMBERS)
    return (numbers.astype(jnp.float32) * factor).astype(dtype)

"""Tiles of 8, 16 or 32 heads: a warpgroup that computes, one that loads, and two that may widen.

A product of the matrix unit has 64 rows. Here these are keys, or columns of the values, and heads
are the columns: so no row is padding, and the queries take the room of their heads alone. The rest
is a ring of loads, as many as there is room for: a decode waits for memory, not for products.
"""

import functools
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ...dense.token_scales import THREADS
from ...ring import Ring
from ..kernel_config import HEAD_DIM, KEYS, SWIZZLE, VALUE_DIM, KernelConfig
from ..split_kv import Schedule, items_of_part, own_part
from .chunks import CHUNK, CHUNKS, PIECE, PIECES
from .compute import compute
from .loads import load
from .widen import WIDENING, widen

COMPUTING = 1  # warpgroups
MEMORY_BYTES = 227 << 10  # of a multiprocessor
BARRIER_BYTES = 256
ALIGNED = 1 << 10  # bytes, at a multiple of which each array begins
# Steps for which there is room beside what is held in eight bits, and whose scales are there. Those
# of step s take the place of those of step s - 2 when its first chunk is free: read by then.
WIDENED = 2


class Memory(NamedTuple):
    """In a multiprocessor's memory."""

    query: Any  # [pieces, heads, columns]; results leave through it
    latents: Any  # [places, keys, columns]
    held: Any  # the same in eight bits
    scales: Any  # [steps, threads]
    weights: Any  # [heads, keys]
    lse: Any


class Barriers(NamedTuple):
    queries: Any
    full: Any
    free: Any
    held_full: Any
    held_free: Any


class Room(NamedTuple):
    """For how many chunks there is room: in 16 bits, and in eight.

    The warpgroups that widen take these in turn. Both numbers are multiples of WIDENING, so each
    place is one warpgroup's: a wait that skips a phase would not notice.
    """

    wide: int
    held: int


def warpgroups(config: KernelConfig) -> int:
    """One that computes, one that loads, and those that widen."""
    return 2 + WIDENING if config.cache_dtype else 2


def scratch_bytes(config: KernelConfig) -> int:
    """Of reductions among the warps: two float32 of each thread for each eight heads."""
    return config.rows // 8 * 2 * THREADS * 4


def sums_shape(config: KernelConfig) -> tuple[int, int]:
    """Of what a part leaves to others of one tile."""
    return VALUE_DIM, config.rows


def room_of(config: KernelConfig) -> Room:
    query, weights = (2 * config.rows * columns for columns in (HEAD_DIM, KEYS))
    taken = query + weights + ALIGNED + scratch_bytes(config) + BARRIER_BYTES  # lse is small
    left, chunk = MEMORY_BYTES - taken, KEYS * CHUNK
    if not config.cache_dtype:
        return Room(left // (2 * chunk), 0)
    left -= WIDENED * (CHUNKS * 2 * chunk + 4 * THREADS)
    return Room(WIDENED * CHUNKS, left // chunk // WIDENING * WIDENING)


def memory_of(config: KernelConfig, dtype) -> Memory:
    def tiled(dtype, swizzle, *sizes):
        tile = 8, swizzle // jnp.dtype(dtype).itemsize
        transforms = plgpu.TilingTransform(tile), plgpu.SwizzleTransform(swizzle)
        return plgpu.SMEM(sizes, dtype, transforms=transforms)

    room, chunk = room_of(config), (KEYS, CHUNK)
    held, scales = config.cache_dtype, config.token_scales
    return Memory(
        tiled(dtype, SWIZZLE, PIECES, config.rows, PIECE),
        tiled(dtype, SWIZZLE, room.wide, *chunk),
        tiled(held, PIECE, room.held, *chunk) if held else None,
        plgpu.SMEM((WIDENED, THREADS), jnp.float32) if scales else None,
        tiled(dtype, SWIZZLE, 1, config.rows, KEYS),
        plgpu.SMEM((config.rows,), jnp.float32),
    )


def barriers_of(config: KernelConfig) -> Barriers:
    def barrier(arrivals, slots=1):
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=slots) if slots else None

    room = room_of(config)
    return Barriers(
        barrier(PIECES),
        barrier(1 if config.cache_dtype else config.pages, room.wide),
        barrier(1, room.wide),
        barrier(config.pages, room.held),
        barrier(1, room.held),
    )


def program(config: KernelConfig, arrays, memory: Memory, barriers: Barriers):
    warpgroup, tile = lax.axis_index("wg"), lax.axis_index("group")
    schedule = Schedule(arrays.tokens, arrays.parts)
    work_items = functools.partial(items_of_part, config, own_part(config), schedule)
    wide = Ring(memory.latents, barriers.full, barriers.free)
    held = Ring(memory.held, barriers.held_full, barriers.held_free)

    @pl.when(warpgroup == 0)
    def computing():
        compute(config, arrays, memory, barriers.queries, wide, work_items, tile)

    @pl.when(warpgroup == 1)
    def loading():
        load(config, arrays, held if config.cache_dtype else wide, work_items)

    if config.cache_dtype:

        @pl.when(warpgroup >= 2)
        def widening():
            turn = warpgroup - 2
            widen(config, arrays, memory.scales, (held, wide), turn, work_items)

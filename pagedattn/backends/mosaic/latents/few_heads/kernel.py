"""Tiles of 8, 16 or 32 heads: a warpgroup that computes, and one that loads.

A product of the matrix unit has 64 rows. Here these are keys, or columns of the values, and heads
are the columns: so no row is padding, and the queries take the room of their heads alone. The rest
is a ring of loads, as many as there is room for: a decode waits for memory, not for products.
"""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ...ring import Ring
from ..kernel_config import HEAD_DIM, KEYS, SWIZZLE, VALUE_DIM, KernelConfig
from ..softmax import reduction_floats
from ..split_kv import own_items
from .chunks import CHUNK, PIECE, PIECES
from .compute import compute
from .loads import load

SUMMING = 1  # warpgroups that sum values, and may leave sums to others
WARPGROUPS = SUMMING + 1  # one loads
MEMORY_BYTES = 227 << 10  # of a multiprocessor
BARRIER_BYTES = 256
ALIGNED = 1 << 10  # bytes, at a multiple of which each array begins


class Memory(NamedTuple):
    """In a multiprocessor's memory."""

    query: Any  # [pieces, heads, columns]; results leave through it
    latents: Any  # [places, keys, columns]
    weights: Any  # [heads, keys]
    lse: Any  # f32[heads]


class Barriers(NamedTuple):
    queries: Any
    full: Any
    free: Any


def scratch_bytes(config: KernelConfig) -> int:
    """Of reductions among the warps."""
    return 4 * reduction_floats(config.rows)


def sums_shape(config: KernelConfig) -> tuple[int, int]:
    """Of what a part leaves to others of one tile."""
    return VALUE_DIM, config.rows


def room_of(config: KernelConfig) -> int:
    """For how many chunks there is room."""
    query, weights = (2 * config.rows * columns for columns in (HEAD_DIM, KEYS))
    taken = query + weights + ALIGNED + scratch_bytes(config) + BARRIER_BYTES  # lse is small
    return (MEMORY_BYTES - taken) // (2 * KEYS * CHUNK)


def memory_of(config: KernelConfig, dtype) -> Memory:
    def tiled(*sizes):
        tile = 8, SWIZZLE // jnp.dtype(dtype).itemsize
        transforms = plgpu.TilingTransform(tile), plgpu.SwizzleTransform(SWIZZLE)
        return plgpu.SMEM(sizes, dtype, transforms=transforms)

    return Memory(
        tiled(PIECES, config.rows, PIECE),
        tiled(room_of(config), KEYS, CHUNK),
        tiled(1, config.rows, KEYS),
        plgpu.SMEM((config.rows,), jnp.float32),
    )


def barriers_of(config: KernelConfig) -> Barriers:
    def barrier(arrivals, slots=1):
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=slots)

    room = room_of(config)
    return Barriers(barrier(PIECES), barrier(config.pages, room), barrier(1, room))


def program(config: KernelConfig, arrays, memory: Memory, barriers: Barriers):
    warpgroup, tile = lax.axis_index("wg"), lax.axis_index("group")
    work_items = own_items(config, arrays)
    ring = Ring(memory.latents, barriers.full, barriers.free)

    @pl.when(warpgroup == 0)
    def computing():
        compute(config, arrays, memory, barriers.queries, ring, work_items, tile)

    @pl.when(warpgroup == 1)
    def loading():
        load(config, arrays, ring, work_items)

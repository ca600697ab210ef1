"""Latents of eight bits: two warpgroups weigh keys, two add up values, one loads.

A product of the matrix unit has 64 rows: keys, or columns of the values; heads are its columns.
Rows come from registers, made float16 there, so that memory is read once for each product and
written by loads alone: it is what limits a multiprocessor here.
"""

import functools
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ...dense.token_scales import THREADS
from ...ring import Ring
from ..kernel_config import HEAD_DIM, KEYS, SWIZZLE, KernelConfig
from ..split_kv import Schedule, items_of_part, own_part
from .keys import weigh_keys
from .loads import load
from .operands import COLUMNS, FEW_KEYS, PIECE
from .values import add_values
from .warpgroups import HALVES, turns

COMPUTING = HALVES  # warpgroups that leave sums to others
MEMORY_BYTES = 227 << 10  # of a multiprocessor
BARRIER_BYTES = 512
ALIGNED = 1 << 10  # bytes, at a multiple of which each array begins


class Memory(NamedTuple):
    """In a multiprocessor's memory."""

    query: Any  # [1, pieces, heads, columns] in float16
    query_factors: Any  # [heads]: on products
    latents: Any  # [places, keys, columns] in eight bits
    tops: Any  # [turns, heads]: about the largest logits so far
    scratch: Any  # [turns, floats]: of reductions among the warps
    weights: Any  # [turns, heads, keys] in float16
    kept: Any  # [turns, heads]: by what sums shrink
    sums: Any  # [1, turns, 2, heads]: about the largest logits, and the sums of weights


class Barriers(NamedTuple):
    query_full: Any
    query_free: Any
    full: Any
    free: Any
    tops: Any
    weights_full: Any
    weights_free: Any
    sums_full: Any
    sums_free: Any


class Rings(NamedTuple):
    query: Ring
    latents: Ring
    tops: Ring
    weights: Ring
    sums: Ring


def warpgroups(config: KernelConfig) -> int:
    """Those of keys, those of values, and one that loads."""
    return turns(config) + HALVES + 1


def scratch_bytes(config: KernelConfig) -> int:
    """Each warpgroup has scratch of its own."""
    return 0


def scratch_size(config: KernelConfig) -> int:
    """Two numbers of each thread for each eight heads."""
    return config.rows // 8 * 2 * THREADS


def sums_shape(config: KernelConfig) -> tuple[int, int]:
    """Of what a part leaves to others of one tile."""
    return COLUMNS, config.rows


def room_of(config: KernelConfig) -> int:
    """For the keys of how many steps there is room."""
    query, weights = 2 * config.rows * HEAD_DIM, turns(config) * 2 * config.rows * KEYS
    scratch = turns(config) * 4 * scratch_size(config)
    taken = query + weights + scratch + 6 * ALIGNED + BARRIER_BYTES  # the rest is small
    return (MEMORY_BYTES - taken) // (KEYS * HEAD_DIM)


def memory_of(config: KernelConfig, dtype) -> Memory:
    def tiled(dtype, swizzle, *sizes):
        tile = 8, swizzle // jnp.dtype(dtype).itemsize
        transforms = plgpu.TilingTransform(tile), plgpu.SwizzleTransform(swizzle)
        return plgpu.SMEM(sizes, dtype, transforms=transforms)

    def numbers(*sizes):
        return plgpu.SMEM(sizes, jnp.float32)

    places, heads, pieces = room_of(config), config.rows, HEAD_DIM // PIECE
    each = turns(config)
    return Memory(
        tiled(jnp.float16, SWIZZLE, 1, pieces, heads, PIECE),
        numbers(heads),
        tiled(config.cache_dtype, PIECE, places, KEYS, HEAD_DIM),
        numbers(each, heads),
        numbers(each, scratch_size(config)),
        tiled(jnp.float16, 2 * FEW_KEYS, each, heads, KEYS),
        numbers(each, heads),
        numbers(1, each, 2, heads),
    )


def barriers_of(config: KernelConfig) -> Barriers:
    def barrier(arrivals, slots):
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=slots)

    places, each = room_of(config), turns(config)
    return Barriers(
        query_full=barrier(each, 1),
        query_free=barrier(each, 1),
        full=barrier(config.pages, places),
        free=barrier(1 + HALVES, places),
        tops=barrier(1, each),
        weights_full=barrier(1, each),
        weights_free=barrier(HALVES, each),
        sums_full=barrier(each, 1),
        sums_free=barrier(HALVES, 1),
    )


def program(config: KernelConfig, arrays, memory: Memory, barriers: Barriers):
    warpgroup, tile = lax.axis_index("wg"), lax.axis_index("group")
    values_begin, loads_begin = turns(config), turns(config) + HALVES
    schedule = Schedule(arrays.tokens, arrays.parts)
    work_items = functools.partial(items_of_part, config, own_part(config), schedule)
    rings = Rings(
        Ring(memory.query, barriers.query_full, barriers.query_free),
        Ring(memory.latents, barriers.full, barriers.free),
        Ring(memory.tops, barriers.tops, None),
        Ring(memory.weights, barriers.weights_full, barriers.weights_free),
        Ring(memory.sums, barriers.sums_full, barriers.sums_free),
    )

    @pl.when(warpgroup < values_begin)
    def keys():
        weigh_keys(config, arrays, memory, rings, work_items, (warpgroup, tile))

    @pl.when((warpgroup >= values_begin) & (warpgroup < loads_begin))
    def values():
        add_values(config, arrays, memory, rings, work_items, (warpgroup - values_begin, tile))

    @pl.when(warpgroup == loads_begin)
    def loading():
        load(config, arrays, rings.latents, work_items)

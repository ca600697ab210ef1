"""Latents of eight bits: a warpgroup weighs keys, two add up values, one loads.

A product of the matrix unit has 64 rows: keys as they are held, or columns of the values, which
come from registers, made float16 there; heads are its columns. So memory is read once for each
product and written by loads alone.
"""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ...ring import Ring
from ..kernel_config import HEAD_DIM, KEYS, KernelConfig
from ..softmax import reduction_floats
from ..split_kv import own_items
from .keys import weigh_keys
from .loads import load
from .operands import COLUMNS, FEW_KEYS, PIECE
from .queries import query_rows
from .roles import HALVES
from .values import add_values

SUMMING = HALVES  # warpgroups that sum values, and may leave sums to others
WARPGROUPS = 1 + SUMMING + 1  # one of keys, and one that loads
BUFFERS = 2  # of weights
LINE = 32  # floats, at a multiple of which TMA writes; JAX 0.10 loads no fewer
PLACES = 4  # for the keys of a step: with 5, for which 16 heads leave room, decodes took longer


class Memory(NamedTuple):
    """In a multiprocessor's memory."""

    query: Any  # [1, parts of queries * heads, columns] in eight bits: 1 for an `opaque` index
    query_factors: Any  # [heads]: on products
    latents: Any  # [places, keys, columns] in eight bits
    scales: Any  # [places, pages, keys of a page and those behind it]: of tokens; or None
    scratch: Any  # [floats]: of reductions among the warps
    weights: Any  # [buffers, heads, keys] in float16
    correction: Any  # [buffers, heads]: factors on earlier sums
    sums: Any  # [1, 2, heads]: about the largest logits, and the sums of weights


class Barriers(NamedTuple):
    full: Any
    free: Any
    weights_full: Any
    weights_free: Any
    sums_full: Any
    sums_free: Any


class Rings(NamedTuple):
    latents: Ring
    weights: Ring
    sums: Ring


def scratch_bytes(config: KernelConfig) -> int:
    """None of JAX's: the one warpgroup that reduces, that of the keys, has `Memory.scratch`."""
    return 0


def sums_shape(config: KernelConfig) -> tuple[int, int]:
    """Of what a part leaves to others of one tile."""
    return COLUMNS, config.rows


def memory_of(config: KernelConfig, dtype) -> Memory:
    def tiled(dtype, swizzle, *sizes):
        tile = 8, swizzle // jnp.dtype(dtype).itemsize
        transforms = plgpu.TilingTransform(tile), plgpu.SwizzleTransform(swizzle)
        return plgpu.SMEM(sizes, dtype, transforms=transforms)

    def numbers(*sizes):
        return plgpu.SMEM(sizes, jnp.float32)

    heads = config.rows
    return Memory(
        tiled(config.cache_dtype, PIECE, 1, query_rows(config), HEAD_DIM),
        numbers(heads),
        tiled(config.cache_dtype, PIECE, PLACES, KEYS, HEAD_DIM),
        numbers(PLACES, config.pages, max(LINE, config.page_keys)) if config.token_scales else None,
        numbers(reduction_floats(config.rows)),
        tiled(jnp.float16, 2 * FEW_KEYS, BUFFERS, heads, KEYS),
        numbers(BUFFERS, heads),
        numbers(1, 2, heads),
    )


def barriers_of(config: KernelConfig) -> Barriers:
    def barrier(arrivals, slots):
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=slots)

    return Barriers(
        full=barrier(config.pages * (2 if config.token_scales else 1), PLACES),
        free=barrier(HALVES, PLACES),
        weights_full=barrier(1, BUFFERS),
        weights_free=barrier(HALVES, BUFFERS),
        sums_full=barrier(1, 1),
        sums_free=barrier(HALVES, 1),
    )


def program(config: KernelConfig, arrays, memory: Memory, barriers: Barriers):
    warpgroup, tile = lax.axis_index("wg"), lax.axis_index("group")
    work_items = own_items(config, arrays)
    rings = Rings(
        Ring(memory.latents, barriers.full, barriers.free),
        Ring(memory.weights, barriers.weights_full, barriers.weights_free),
        Ring(memory.sums, barriers.sums_full, barriers.sums_free),
    )

    @pl.when(warpgroup == 0)
    def keys():
        weigh_keys(config, arrays, memory, rings, work_items, tile)

    @pl.when((warpgroup > 0) & (warpgroup <= HALVES))
    def values():
        add_values(config, arrays, memory, rings, work_items, (warpgroup - 1, tile))

    @pl.when(warpgroup > HALVES)
    def loading():
        load(config, arrays, memory.scales, rings.latents, work_items)

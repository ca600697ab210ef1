"""Tiles of 64 heads: two warpgroups that compute and one that loads."""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ..kernel_config import KEYS, ROWS, SWIZZLE, KernelConfig
from ..split_kv import own_items
from .compute import compute
from .loads import load
from .shares import HALF, REST

SUMMING = 2  # warpgroups that sum values, and may leave sums to others
WARPGROUPS = SUMMING + 1  # one loads


class Memory(NamedTuple):
    """In a multiprocessor's memory."""

    query: Any  # [2 halves, heads, HALF]; results leave through it
    query_rest: Any  # [1, heads, REST]: 1 for an `opaque` index
    values: Any  # [2 halves, even and odd steps, keys, HALF]
    rest: Any  # [even and odd steps, keys, REST]
    weights: Any  # [1, heads, keys]
    vectors: Any  # f32[4, heads]: top, two totals, and lse


class Barriers(NamedTuple):
    query_full: Any
    query_free: Any
    values_full: Any
    values_free: Any
    rest_full: Any
    rest_free: Any
    weights: Any  # by which warpgroup they were made
    turn: Any  # the second warpgroup multiplies keys after the first
    totals: Any  # both know them
    last: Any  # nobody of a cluster leaves before the others are done with its memory


def scratch_bytes(config: KernelConfig) -> int:
    """Of reductions among warps: there are none."""
    return 0


def sums_shape(config: KernelConfig) -> tuple[int, int]:
    """Of what each of two warpgroups leaves to others of one tile."""
    return ROWS, HALF


def memory_of(config: KernelConfig, dtype) -> Memory:
    transforms = plgpu.TilingTransform((8, SWIZZLE // 2)), plgpu.SwizzleTransform(SWIZZLE)

    def tiled(*sizes):
        return plgpu.SMEM(sizes, dtype, transforms=transforms)

    return Memory(
        tiled(2, ROWS, HALF),
        tiled(1, ROWS, REST),
        tiled(2, 2, KEYS, HALF),
        tiled(2, KEYS, REST),
        tiled(1, ROWS, KEYS),
        plgpu.SMEM((4, ROWS), jnp.float32),
    )


def barriers_of(config: KernelConfig) -> Barriers:
    def barrier(arrivals, *slots):
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=slots or 1)

    def shared(arrivals, *slots):
        return plgpu.ClusterBarrier(
            collective_axes=("mate",), num_arrivals=arrivals, num_barriers=slots or 1
        )

    return Barriers(
        barrier(3),
        barrier(2),
        barrier(config.pages, 2, 2),
        shared(1, 2, 2),
        barrier(config.pages, 2),
        shared(1, 2),
        barrier(1, 2),
        barrier(1),
        barrier(2),
        shared(2),
    )


def program(config: KernelConfig, arrays, memory: Memory, barriers: Barriers):
    warpgroup = lax.axis_index("wg")
    tile = lax.axis_index("group") * config.cluster + lax.axis_index("mate")
    work_items = own_items(config, arrays)

    for half in range(2):

        @pl.when(warpgroup == half)
        def computing(half=half):
            compute(config, arrays, memory, barriers, work_items, tile, half)

    @pl.when(warpgroup == 2)
    def loading():
        load(config, arrays, memory, barriers, work_items, tile)

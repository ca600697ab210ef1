"""One persistent program a multiprocessor: two warpgroups that compute and one that loads."""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ...._arrays.shard_map import traced_apart
from .compute import compute
from .kernel_config import HALF, KEYS, REST, ROWS, SWIZZLE, VALUE_DIM, KernelConfig
from .loads import load
from .split_kv import Schedule, items_of_part


class Arrays(NamedTuple):
    """In the device's memory."""

    query: Any
    latents: Any
    tables: Any
    tokens: Any
    parts: Any
    out: Any
    lse: Any
    part_out: Any  # in two of the query's dtype, what the first leaves is in the second
    part_lse: Any


class Memory(NamedTuple):
    """In a multiprocessor's memory; `values` are two halves of columns, each of two steps."""

    query: Any
    query_rest: Any
    values: Any
    rest: Any
    weights: Any
    vectors: Any  # a number for each row: top, two totals, and lse


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


def attention(config: KernelConfig, query, latents, tables, schedule: Schedule):
    """out, lse `f32[num_tokens, tiles, 64]`, and partial results in their slots."""

    def body(*refs):
        run = functools.partial(program, config, Arrays(*refs))
        scratch = memory_of(query.dtype), barriers_of(config)
        pl.run_scoped(run, *scratch, collective_axes="wg")

    rows = config.num_heads, VALUE_DIM
    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((config.num_tokens, *rows), query.dtype),
            jax.ShapeDtypeStruct((config.num_tokens, config.tiles, ROWS), jnp.float32),
            jax.ShapeDtypeStruct((2, config.slots, *rows), query.dtype),
            jax.ShapeDtypeStruct((config.slots, config.tiles, ROWS), jnp.float32),
        ),
        grid=(config.parts, config.tiles // config.cluster),
        grid_names=("part", "group"),
        cluster=(config.cluster,),
        cluster_names=("mate",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
    )
    return traced_apart(kernel, query, latents, tables, *schedule)


def memory_of(dtype) -> Memory:
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


def program(config: KernelConfig, arrays: Arrays, memory: Memory, barriers: Barriers):
    warpgroup, part = lax.axis_index("wg"), lax.axis_index("part")
    tile = lax.axis_index("group") * config.cluster + lax.axis_index("mate")
    schedule = Schedule(arrays.tokens, arrays.parts)
    work_items = functools.partial(items_of_part, config, part, schedule)

    for half in range(2):

        @pl.when(warpgroup == half)
        def computing(half=half):
            compute(config, arrays, memory, barriers, work_items, tile, half)

    @pl.when(warpgroup == 2)
    def loading():
        load(config, arrays, memory, barriers, work_items, tile)

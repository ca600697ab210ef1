"""One persistent program a multiprocessor: a warpgroup that loads and two that compute."""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ...._arrays.shard_map import traced_apart
from ..in_place import unfused
from .compute import compute
from .kernel_config import UNIT, WARPGROUP, KernelConfig
from .lines import Lines
from .loads import WARPS, load
from .split_kv import Schedule, cut_tiles
from .tile_tasks import visit_all, whole_tiles
from .tiles import Table


class Arrays(NamedTuple):
    """In the device's memory."""

    query: Any
    key: Any
    value: Any
    tables: Any
    schedule: Any  # the tiles: a Schedule or a Table
    lines: Any  # Lines
    slopes: Any
    out: Any
    lse: Any
    part_out: Any = None  # of the first item of each part: sums of weighted values,
    part_state: Any = None  # the largest logits and the sums of weights
    finished: Any = None  # semaphores: whether the two are there


class Memory(NamedTuple):
    """In a multiprocessor's memory."""

    query: Any  # a warpgroup's rows as a matrix, and as units of columns as wide as the swizzle
    units: Any
    key: Any
    value: Any
    value_rows: Any
    lse: Any


class Scratch(NamedTuple):
    queries: Any
    key: Any
    values: Any
    lse: Any


class Barriers(NamedTuple):
    query_full: Any
    query_free: Any
    key_full: Any
    key_free: Any
    value_full: Any
    value_free: Any
    edge: Any
    turn: Any


def attention(
    config: KernelConfig,
    programs: int,
    query,
    key,
    value,
    tables,
    schedule: Schedule | Table,
    lines: Lines,
    slopes,
):
    """out `[num_tokens, num_heads, head_dim]` and lse `f32[max_tiles, num_kv_heads, 2, 64]`."""

    operands, structure = jax.tree.flatten((query, key, value, tables, schedule, lines, slopes))

    def body(*refs):
        inputs, results = refs[: len(operands)], refs[len(operands) :]
        arrays = Arrays(*jax.tree.unflatten(structure, inputs), *results)
        arrays = arrays._replace(finished=semaphores(config))
        scratch = memory_of(config, query.dtype), barriers_of(config)
        run = functools.partial(program, config, programs, arrays)
        pl.run_scoped(run, *scratch, collective_axes="wg")

    kernel = plgpu.kernel(
        body,
        out_type=results_of(config, query),
        grid=(config.parts * config.num_kv_heads or programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
    )
    if config.parts:
        kernel = unfused(kernel)  # for its semaphores
    out, lse, *_ = traced_apart(kernel, *operands)
    return out, lse


def results_of(config: KernelConfig, query):
    """out and lse, and with cut keys room for the partial results that parts leave to others.

    Room for both warpgroups: the second has rows of a tile too small for it, if lengths in jit say
    that a sequence has more queries than `max_query_len`.
    """
    lse = (config.max_tiles if config.with_lse else 1, config.num_kv_heads, 2, WARPGROUP)
    results = [
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct(lse, jnp.float32),
    ]
    if config.parts:
        rows = config.parts, config.num_kv_heads, 2
        results.append(jax.ShapeDtypeStruct((*rows, WARPGROUP, config.head_dim), jnp.float32))
        results.append(jax.ShapeDtypeStruct((*rows, 2, WARPGROUP), jnp.float32))
    return tuple(results)


def semaphores(config: KernelConfig):
    """One for each partial result, 0 when the kernel starts."""
    if not config.parts:
        return None
    count = config.parts, config.num_kv_heads, 2
    return pl.get_global(plgpu.SemaphoreType.REGULAR(count))


def memory_of(config: KernelConfig, dtype) -> Scratch:
    columns = config.swizzle // 2
    transforms = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(config.swizzle)

    def tiled(*sizes):
        return plgpu.SMEM((*sizes, config.head_dim), dtype, transforms=transforms)

    def by_rows(*sizes):
        work_items = *sizes[:-1], sizes[-1] // UNIT, config.head_dim // columns, UNIT, columns
        return plgpu.SMEM(work_items, dtype, transforms=transforms[1:])

    queries = config.query_slots, 2, WARPGROUP
    return Scratch(
        plgpu.RefUnion(tiled(*queries), by_rows(*queries)),
        tiled(config.key_stages, config.keys),
        plgpu.RefUnion(
            tiled(config.value_stages, config.keys), by_rows(config.value_stages, config.keys)
        ),
        plgpu.SMEM((2, WARPGROUP), jnp.float32),
    )


def barriers_of(config: KernelConfig) -> Barriers:
    def barrier(arrivals, slots):
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=slots)

    full = max(config.pages, WARPS)  # a warp without pages arrives, too: none falls behind the ring
    keys = barrier(full, config.key_stages), barrier(2, config.key_stages)
    values = barrier(full, config.value_stages), barrier(2, config.value_stages)
    edge = min(config.block_size, config.keys) * config.head_dim * 2 // config.swizzle
    loads = config.units * config.head_dim * 2 // config.swizzle
    queries = barrier(loads, config.query_slots), barrier(2, config.query_slots)
    return Barriers(*queries, *keys, *values, barrier(edge, 1), barrier(1, 2))


def program(config: KernelConfig, programs: int, arrays: Arrays, memory: Any, barriers):
    warpgroup = lax.axis_index("wg")
    memory = Memory._make([*memory.queries, memory.key, *memory.values, memory.lse])
    me = lax.axis_index("program")
    if config.parts:
        tasks = functools.partial(cut_tiles, config, me, arrays.schedule)
    else:
        tasks = functools.partial(whole_tiles, config, programs, me, arrays.schedule)
    schedule = functools.partial(visit_all, tasks)

    @pl.when(warpgroup < 2)
    def computing():
        compute(config, arrays, memory, barriers, schedule, warpgroup)

    @pl.when(warpgroup == 2)
    def loading():
        load(config, arrays, memory, barriers, schedule)

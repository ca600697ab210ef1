"""One persistent program a multiprocessor: a warpgroup that loads and two that compute.

Where a cache holds eight bits, one more widens what is loaded.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ...._arrays.shard_map import traced_apart
from ..in_place import unfused
from ..warpgroup import WARPS
from . import token_scales
from .compute import compute
from .kernel_config import ROWS, UNIT, WARPGROUP, KernelConfig
from .lines import Lines
from .loads import load
from .split_kv import Schedule, cut_tiles
from .tile_tasks import visit_all, whole_tiles
from .tiles import Table
from .token_scales import Scales
from .widen import HeldBarriers, HeldMemory, widen


class Arrays(NamedTuple):
    """In the device's memory."""

    query: Any
    key: Any
    value: Any
    scales: Any  # Scales
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

    query: Any  # a warpgroup's rows as a matrix of what is multiplied,
    results: Any  # of what queries and results are,
    units: Any  # and as units of columns as wide as the swizzle
    key: Any
    value: Any
    value_rows: Any
    lse: Any
    scales: Any  # of tokens: token_scales.Rows


class Scratch(NamedTuple):
    queries: Any
    key: Any
    values: Any


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
    scales: Scales,
    tables,
    schedule: Schedule | Table,
    lines: Lines,
    slopes,
):
    """out `[num_tokens, num_heads, head_dim]` and lse `f32[max_tiles, num_kv_heads, 2, 64]`."""

    arrays = query, key, value, scales, tables, schedule, lines, slopes
    operands, structure = jax.tree.flatten(arrays)

    def body(*refs):
        inputs, results = refs[: len(operands)], refs[len(operands) :]
        arrays = Arrays(*jax.tree.unflatten(structure, inputs), *results)
        arrays = arrays._replace(finished=semaphores(config))
        scratch = memory_of(config, query.dtype), barriers_of(config, key.dtype.itemsize)
        held = ()
        if config.cache_dtype:
            held = ring_of(config, key.dtype, key.dtype, 1), held_barriers(config)
        scratch = *scratch, numbers_of(config), *held
        run = functools.partial(program, config, programs, arrays)
        pl.run_scoped(run, *scratch, collective_axes="wg")

    kernel = plgpu.kernel(
        body,
        out_type=results_of(config, query),
        grid=(config.parts * config.num_kv_heads or programs,),
        grid_names=("program",),
        num_threads=4 if config.cache_dtype else 3,
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
    queries = config.query_slots, 2, WARPGROUP
    views = tiled(config, dtype, *queries), by_rows(config, dtype, *queries)
    if not config.cache_dtype:
        return Scratch(plgpu.RefUnion(*views), *ring_of(config, dtype, dtype, config.stages))
    views = plgpu.RefUnion(*views, tiled(config, jnp.float16, *queries))
    return Scratch(views, *ring_of(config, jnp.float16, jnp.float16, config.stages))


def numbers_of(config: KernelConfig):
    """Memory for lse, and for the per-token scales.

    One array, since each begins at a multiple of 1024 bytes.
    """
    rows = 1 + (len(token_scales.Rows._fields) if config.token_scales else 0)
    return plgpu.SMEM((rows, ROWS), jnp.float32)


def ring_of(config: KernelConfig, key_dtype, dtype, stages: int):
    """Memory for the keys of some steps, and for their values, which may be loaded row by row."""
    size = stages, config.keys
    values = tiled(config, dtype, *size), by_rows(config, dtype, *size)
    return tiled(config, key_dtype, *size), plgpu.RefUnion(*values)


def tiled(config: KernelConfig, dtype, *sizes):
    """Transforms are named, since JAX 0.11 finds some for memory without: another view has none."""
    columns = config.swizzle // jnp.dtype(dtype).itemsize
    transforms = plgpu.TilingTransform((UNIT, columns)), plgpu.SwizzleTransform(config.swizzle)
    return plgpu.SMEM((*sizes, config.head_dim), dtype, transforms=transforms)


def by_rows(config: KernelConfig, dtype, *sizes):
    """The same memory, of which a row's columns in one tile are one array."""
    columns = config.swizzle // jnp.dtype(dtype).itemsize
    parts = *sizes[:-1], sizes[-1] // UNIT, config.head_dim // columns, UNIT, columns
    return plgpu.SMEM(parts, dtype, transforms=(plgpu.SwizzleTransform(config.swizzle),))


def barriers_of(config: KernelConfig, held_bytes: int) -> Barriers:
    """`held_bytes` are those of a number as the cache holds it."""

    def barrier(arrivals, slots):
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=slots)

    full = 1 if config.cache_dtype else loads_of(config)
    ring = barrier(full, config.stages), barrier(2, config.stages)
    rows = min(config.block_size, config.keys)
    edge = rows * config.head_dim * held_bytes // config.swizzle
    loads = config.units * config.head_dim * 2 // config.swizzle
    queries = barrier(loads, config.query_slots), barrier(2, config.query_slots)
    return Barriers(*queries, *ring, *ring, barrier(edge, 1), barrier(1, 2))


def held_barriers(config: KernelConfig) -> HeldBarriers:
    full = plgpu.Barrier(num_arrivals=loads_of(config), num_barriers=1)
    free = plgpu.Barrier(num_arrivals=1, num_barriers=1)
    return HeldBarriers(full, free, full, free)


def loads_of(config: KernelConfig) -> int:
    """Arrivals that fill a slot. A warp without pages arrives, too: none falls behind the ring."""
    return max(config.pages, WARPS)


def program(config: KernelConfig, programs: int, arrays: Arrays, scratch, barriers, numbers, *held):
    """`held` are memory and barriers for what is held in eight bits, if it is."""
    memory = with_numbers(config, scratch, numbers)
    warpgroup, me = lax.axis_index("wg"), lax.axis_index("program")
    if config.parts:
        tasks = functools.partial(cut_tiles, config, me, arrays.schedule)
    else:
        tasks = functools.partial(whole_tiles, config, programs, me, arrays.schedule)
    schedule = functools.partial(visit_all, tasks)

    @pl.when(warpgroup < 2)
    def computing():
        compute(config, arrays, memory, barriers, schedule, warpgroup)

    if not held:
        pl.when(warpgroup == 2)(lambda: load(config, arrays, memory, barriers, schedule))
        return
    (key, values), signals = held
    held = HeldMemory._make((key, *values)), signals

    @pl.when(warpgroup == 2)
    def loading():
        instead = memory._replace(**held[0]._asdict()), barriers._replace(**signals._asdict())
        load(config, arrays, *instead, schedule)

    @pl.when(warpgroup == 3)
    def widening():
        widen(config, arrays, held, memory, barriers, schedule)


def with_numbers(config: KernelConfig, scratch: Scratch, numbers) -> Memory:
    lse, rows = numbers.at[0], len(token_scales.Rows._fields)
    scales = None
    if config.token_scales:
        scales = token_scales.Rows(*(numbers.at[1 + i] for i in range(rows)))
    results, units, *query = scratch.queries
    query = query[0] if query else results
    return Memory._make((query, results, units, scratch.key, *scratch.values, lse, scales))

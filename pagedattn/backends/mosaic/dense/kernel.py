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
from .kernel_config import UNIT, WARPGROUP, Shape
from .loads import WARPS, load
from .split_kv import Work, cut_tiles
from .tile_tasks import visit_all, whole_tiles
from .tiles import Table


class Arrays(NamedTuple):
    """In the device's memory."""

    query: Any
    key: Any
    value: Any
    tables: Any
    work: Any  # the tiles: a Work or a Table
    slopes: Any
    out: Any
    lse: Any
    part_out: Any = None  # of the first piece of each part: sums of weighted values,
    part_state: Any = None  # the largest logits and the sums of weights
    finished: Any = None  # semaphores: whether the two are there


class Memory(NamedTuple):
    """In a multiprocessor's memory."""

    query: Any  # a warpgroup's rows as a matrix, and as units of pieces as wide as the swizzle
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


def attention(shape: Shape, programs: int, query, key, value, tables, work: Work | Table, slopes):
    """out `[num_tokens, num_heads, head_dim]` and lse `f32[max_tiles, num_kv_heads, 2, 64]`."""

    def body(query, key, value, tables, *refs):
        work_refs, (slopes, *results) = refs[: len(work)], refs[len(work) :]
        arrays = Arrays(query, key, value, tables, type(work)(*work_refs), slopes, *results)
        arrays = arrays._replace(finished=semaphores(shape))
        scratch = memory_of(shape, query.dtype), barriers_of(shape)
        run = functools.partial(program, shape, programs, arrays)
        pl.run_scoped(run, *scratch, collective_axes="wg")

    kernel = plgpu.kernel(
        body,
        out_type=results_of(shape, query),
        grid=(shape.parts * shape.num_kv_heads or programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
    )
    if shape.parts:
        kernel = unfused(kernel)  # for its semaphores
    out, lse, *_ = traced_apart(kernel, query, key, value, tables, *work, slopes)
    return out, lse


def results_of(shape: Shape, query):
    """out and lse, and with cut keys room for the partial results that parts leave to others.

    Room for both warpgroups: the second has rows of a tile too small for it, if lengths in jit say
    that a sequence has more queries than `max_query_len`.
    """
    lse = (shape.max_tiles if shape.with_lse else 1, shape.num_kv_heads, 2, WARPGROUP)
    results = [
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct(lse, jnp.float32),
    ]
    if shape.parts:
        rows = shape.parts, shape.num_kv_heads, 2
        results.append(jax.ShapeDtypeStruct((*rows, WARPGROUP, shape.head_dim), jnp.float32))
        results.append(jax.ShapeDtypeStruct((*rows, 2, WARPGROUP), jnp.float32))
    return tuple(results)


def semaphores(shape: Shape):
    """One for each partial result, 0 when the kernel starts."""
    if not shape.parts:
        return None
    count = shape.parts, shape.num_kv_heads, 2
    return pl.get_global(plgpu.SemaphoreType.REGULAR(count))


def memory_of(shape: Shape, dtype) -> Scratch:
    columns = shape.swizzle // 2
    transforms = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(shape.swizzle)

    def tiled(*sizes):
        return plgpu.SMEM((*sizes, shape.head_dim), dtype, transforms=transforms)

    def by_rows(*sizes):
        pieces = *sizes[:-1], sizes[-1] // UNIT, shape.head_dim // columns, UNIT, columns
        return plgpu.SMEM(pieces, dtype, transforms=transforms[1:])

    queries = shape.query_slots, 2, WARPGROUP
    return Scratch(
        plgpu.RefUnion(tiled(*queries), by_rows(*queries)),
        tiled(shape.key_stages, shape.keys),
        plgpu.RefUnion(
            tiled(shape.value_stages, shape.keys), by_rows(shape.value_stages, shape.keys)
        ),
        plgpu.SMEM((2, WARPGROUP), jnp.float32),
    )


def barriers_of(shape: Shape) -> Barriers:
    def barrier(arrivals, slots):
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=slots)

    full = max(shape.pages, WARPS)  # a warp without pages arrives, too: none falls behind the ring
    keys = barrier(full, shape.key_stages), barrier(2, shape.key_stages)
    values = barrier(full, shape.value_stages), barrier(2, shape.value_stages)
    edge = min(shape.block_size, shape.keys) * shape.head_dim * 2 // shape.swizzle
    loads = shape.units * shape.head_dim * 2 // shape.swizzle
    queries = barrier(loads, shape.query_slots), barrier(2, shape.query_slots)
    return Barriers(*queries, *keys, *values, barrier(edge, 1), barrier(1, 2))


def program(shape: Shape, programs: int, arrays: Arrays, memory: Any, barriers):
    warpgroup = lax.axis_index("wg")
    memory = Memory._make([*memory.queries, memory.key, *memory.values, memory.lse])
    me = lax.axis_index("program")
    if shape.parts:
        jobs = functools.partial(cut_tiles, shape, me, arrays.work)
    else:
        jobs = functools.partial(whole_tiles, shape, programs, me, arrays.work)
    work = functools.partial(visit_all, jobs)

    @pl.when(warpgroup < 2)
    def computing():
        compute(shape, arrays, memory, barriers, work, warpgroup)

    @pl.when(warpgroup == 2)
    def loading():
        load(shape, arrays, memory, barriers, work)

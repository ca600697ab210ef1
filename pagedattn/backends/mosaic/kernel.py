"""One persistent program a multiprocessor: a warpgroup that loads and two that compute."""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .compute import compute
from .loads import load
from .shape import UNIT, UNITS, WARPGROUP, Shape
from .tiles import KeyBlocks, Tile, cdiv, key_blocks


class Arrays(NamedTuple):
    """In the device's memory."""

    query: Any
    key: Any
    value: Any
    tables: Any
    tiles: Any
    count: Any
    slopes: Any
    out: Any
    lse: Any


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


def attention(shape: Shape, programs: int, query, key, value, tables, tiles, count, slopes):
    """out `[num_tokens, num_heads, head_dim]` and lse `f32[max_tiles, num_kv_heads, 2, 64]`."""

    def body(*refs):
        scratch = memory_of(shape, query.dtype), barriers_of(shape)
        run = functools.partial(program, shape, programs, Arrays(*refs))
        pl.run_scoped(run, *scratch, collective_axes="wg")

    lse = (shape.max_tiles if shape.with_lse else 1, shape.num_kv_heads, 2, WARPGROUP)
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct(lse, jnp.float32),
        ),
        grid=(programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
    )(query, key, value, tables, tiles, count, slopes)


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

    keys = barrier(shape.pages, shape.key_stages), barrier(2, shape.key_stages)
    values = barrier(shape.pages, shape.value_stages), barrier(2, shape.value_stages)
    edge = min(shape.block_size, shape.keys) * shape.head_dim * 2 // shape.swizzle
    loads = UNITS * shape.head_dim * 2 // shape.swizzle
    queries = barrier(loads, shape.query_slots), barrier(2, shape.query_slots)
    return Barriers(*queries, *keys, *values, barrier(edge, 1), barrier(1, 2))


def program(shape: Shape, programs: int, arrays: Arrays, memory: Any, barriers):
    warpgroup = lax.axis_index("wg")
    memory = Memory._make([*memory.queries, memory.key, *memory.values, memory.lse])
    me = lax.axis_index("program")
    work = functools.partial(tiles_of_program, shape, programs, me, arrays)

    @pl.when(warpgroup < 2)
    def computing():
        compute(shape, arrays, memory, barriers, work, warpgroup)

    @pl.when(warpgroup == 2)
    def loading():
        load(shape, arrays, memory, barriers, work)


class Job(NamedTuple):
    """A tile of this program: which one it is, and how many steps were before it."""

    index: Any
    tile: Tile
    blocks: KeyBlocks
    head: Any
    done: Any


def tiles_of_program(shape: Shape, programs: int, me, arrays: Arrays, begin, visit):
    """Visits the tiles of this program: back and forth over all, so that long ones are shared.

    `begin(job)` gives what the first visit starts with, `visit(job, following, has_next, started)`
    what the next one does.
    """
    total = arrays.count[0] * shape.num_kv_heads

    def nth(index):
        column = jnp.where(lax.rem(index, 2) == 0, me, programs - 1 - me)
        return index * programs + column

    rounds = cdiv(total, programs)
    rounds = jnp.where(nth(rounds - 1) < total, rounds, rounds - 1)

    def look_up(index):
        row = lax.div(nth(index), jnp.int32(shape.num_kv_heads))
        row = jnp.minimum(row, shape.max_tiles - 1)
        return Tile(*(arrays.tiles[row, i] for i in range(len(Tile._fields))))

    def job_of(index, tile, done):
        head = lax.rem(nth(index), jnp.int32(shape.num_kv_heads))
        return Job(index, tile, key_blocks(shape, tile), head, done)

    def visit_one(index, carry):
        done, tile, next_tile, started = carry
        ahead = look_up(index + 2)
        job = job_of(index, tile, done)
        following = job_of(index + 1, next_tile, done + job.blocks.count)
        started = visit(job, following, index + 1 < rounds, started)
        return following.done, next_tile, ahead, started

    @pl.when(rounds > 0)
    def there_is_work():
        first, done = jnp.int32(0), jnp.int32(0)
        tiles = look_up(first), look_up(first + 1)
        started = begin(job_of(first, tiles[0], done))
        lax.fori_loop(0, rounds, visit_one, (done, *tiles, started))

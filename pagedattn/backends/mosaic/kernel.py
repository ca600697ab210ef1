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
from .shape import ROWS, UNIT, UNITS, WARPGROUP, Shape
from .tiles import Tile, cdiv, key_blocks


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
    lse: Any


class Scratch(NamedTuple):
    queries: Any
    key: Any
    value: Any
    lse: Any


class Barriers(NamedTuple):
    query_full: Any
    query_free: Any
    key_full: Any
    key_free: Any
    value_full: Any
    value_free: Any
    tail: Any
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
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
    )(query, key, value, tables, tiles, count, slopes)


def memory_of(shape: Shape, dtype) -> Scratch:
    columns = shape.swizzle // 2
    transforms = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(shape.swizzle)

    def tiled(*sizes):
        return plgpu.SMEM((*sizes, shape.head_dim), dtype, transforms=transforms)

    ring = shape.stages, shape.keys
    matrix = tiled(shape.query_slots, 2, WARPGROUP)
    pieces = shape.query_slots, 2, WARPGROUP // UNIT, shape.head_dim // columns, UNIT, columns
    units = plgpu.SMEM(pieces, dtype, transforms=transforms[1:])
    return Scratch(
        plgpu.RefUnion(matrix, units),
        tiled(*ring),
        tiled(*ring),
        plgpu.SMEM((2, WARPGROUP), jnp.float32),
    )


def barriers_of(shape: Shape) -> Barriers:
    def barrier(arrivals, slots):
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=slots)

    keys = barrier(shape.pages, shape.stages), barrier(2, shape.stages)
    loads = UNITS * shape.head_dim * 2 // shape.swizzle
    queries = barrier(loads, shape.query_slots), barrier(2, shape.query_slots)
    return Barriers(*queries, *keys, *keys, barrier(shape.pages, 1), barrier(1, 2))


def program(shape: Shape, programs: int, arrays: Arrays, memory, barriers):
    warpgroup = lax.axis_index("wg")
    memory = Memory(*memory.queries, *memory[1:])
    work = functools.partial(tiles_of_program, shape, programs, arrays)

    @pl.when(warpgroup < 2)
    def computing():
        compute(shape, arrays, memory, barriers, work, warpgroup)

    @pl.when(warpgroup == 2)
    def loading():
        load(shape, arrays, memory, barriers, work)


def tiles_of_program(shape: Shape, programs: int, arrays: Arrays, visit):
    """Visits the tiles of this program: back and forth over all, so that long ones are shared."""
    me, total = lax.axis_index("program"), arrays.count[0] * shape.num_kv_heads

    def nth(index):
        place = jnp.where(lax.rem(index, 2) == 0, me, programs - 1 - me)
        return index * programs + place

    rounds = cdiv(total, programs)
    rounds = jnp.where(nth(rounds - 1) < total, rounds, rounds - 1)

    def look_up(index):
        row = jnp.minimum(lax.div(nth(index), jnp.int32(shape.num_kv_heads)), shape.max_tiles - 1)
        return Tile(*(arrays.tiles[row, i] for i in range(len(Tile._fields))))

    def visit_one(index, carry):
        done, tile = carry
        ahead = look_up(index + 1)
        blocks = key_blocks(shape, tile)
        head = lax.rem(nth(index), jnp.int32(shape.num_kv_heads))
        visit(index, tile, blocks, head, done)
        return done + blocks.count, ahead

    lax.fori_loop(0, rounds, visit_one, (jnp.int32(0), look_up(jnp.int32(0))))

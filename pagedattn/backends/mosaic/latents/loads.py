"""The warpgroup that loads: a warp each for the halves of the values, the rest, and the queries.

What is free comes at another time for each of them. Table entries are looked up a step ahead: a
load from the table takes longer than a TMA.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .kernel_config import HALF, KEYS, REST, ROWS, VALUE_DIM, Shape


def load(shape: Shape, arrays, memory, barriers, pieces, tile):
    plgpu.set_max_registers(24, action="decrease")

    @plgpu.warp_map
    def one_of_four(warp):
        for half in range(2):

            @pl.when(warp == half)
            def values(half=half):
                full, free = barriers.values_full, barriers.values_free
                columns = slice(half * HALF, (half + 1) * HALF)
                rooms = [
                    (memory.values.at[half, i], full.at[half, i], free.at[half, i])
                    for i in range(2)
                ]
                load_keys(shape, arrays, pieces, columns, rooms)

        @pl.when(warp == 2)
        def rest():
            full, free = barriers.rest_full, barriers.rest_free
            rooms = [(memory.rest.at[i], full.at[i], free.at[i]) for i in range(2)]
            columns = slice(VALUE_DIM, VALUE_DIM + REST)
            load_keys(shape, arrays, pieces, columns, rooms)

        @pl.when(warp == 3)
        def queries():
            load_queries(arrays, memory, barriers, pieces, tile)


def load_queries(arrays, memory, barriers, pieces, tile):
    def visit(piece, index, _):
        @pl.when(index > 0)
        def wait_for_room():
            plgpu.barrier_wait(barriers.query_free)

        rows = pl.ds(tile * ROWS, ROWS)

        def columns(begin, size):
            return arrays.query.at[piece.token, rows, pl.ds(begin, size)]

        full = barriers.query_full
        plgpu.copy_gmem_to_smem(columns(VALUE_DIM, REST), memory.query_rest.at[0], full)
        for half in range(2):
            plgpu.copy_gmem_to_smem(columns(half * HALF, HALF), memory.query.at[half], full)
        return ()

    pieces(visit, ())


def load_keys(shape: Shape, arrays, pieces, columns, rooms):
    """Some columns of the keys of every step, into the rooms of even and of odd steps in turn."""
    size = min(shape.block_size, KEYS)

    def visit(piece, index, _):
        def load_step(step, ids, room, full, free):
            @pl.when(piece.done + step >= 2)
            def wait_for_room():
                plgpu.barrier_wait(free)

            for page, block in enumerate(ids):
                rows = source(shape, piece, step, block)
                target = room.at[pl.ds(page * size, size)]
                keys = arrays.latents.at[*rows, 0, columns]
                plgpu.copy_gmem_to_smem(keys, target, full, collective_axes="mate")

        def pair(i, ids):
            for slot in range(2):
                step = 2 * i + slot
                new = block_ids(shape, arrays, piece, step + 1)
                load_step(step, ids, *rooms[slot])
                ids = new
            return ids

        first = block_ids(shape, arrays, piece, jnp.int32(0))
        lax.fori_loop(0, lax.div(piece.steps, jnp.int32(2)), pair, first)
        return ()

    pieces(visit, ())


def source(shape: Shape, piece, step, block):
    """Block and rows of a page of a step: the whole block, or the keys of a step."""
    if (parts := shape.block_size // KEYS) <= 1:
        return block, slice(None)
    part = lax.rem(jnp.maximum(piece.last - step, 0), jnp.int32(parts))
    return block, pl.ds(part * KEYS, KEYS)


def block_ids(shape: Shape, arrays, piece, step):
    """The pages of a step; one past the cache for what is hidden: TMA fills it with zeros."""
    begin = (piece.last - step) * KEYS
    return [
        block_id(shape, arrays, piece, begin + i * shape.block_size) for i in range(shape.pages)
    ]


def block_id(shape: Shape, arrays, piece, begin):
    index = lax.div(jnp.maximum(begin, 0), jnp.int32(shape.block_size))
    index = jnp.minimum(index, shape.max_blocks - 1)
    seen = (begin >= 0) & (begin < piece.limit)
    return jnp.where(seen, arrays.tables[piece.sequence, index], shape.num_blocks)

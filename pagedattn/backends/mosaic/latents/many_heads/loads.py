"""The warpgroup that loads: a warp each for the halves of the values, the rest, and the queries.

What is free comes at another time for each of them. Table entries are looked up a step ahead: a
load from the table takes longer than a TMA.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ..kernel_config import KEYS, ROWS, VALUE_DIM, KernelConfig
from ..pages import block_ids, source
from .shares import HALF, REST


def load(config: KernelConfig, arrays, memory, barriers, work_items, tile):
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
                load_keys(config, arrays, work_items, columns, rooms)

        @pl.when(warp == 2)
        def rest():
            full, free = barriers.rest_full, barriers.rest_free
            rooms = [(memory.rest.at[i], full.at[i], free.at[i]) for i in range(2)]
            columns = slice(VALUE_DIM, VALUE_DIM + REST)
            load_keys(config, arrays, work_items, columns, rooms)

        @pl.when(warp == 3)
        def queries():
            load_queries(arrays, memory, barriers, work_items, tile)


def load_queries(arrays, memory, barriers, work_items, tile):
    def visit(work_item, index, _):
        @pl.when(index > 0)
        def wait_for_room():
            plgpu.barrier_wait(barriers.query_free)

        rows = pl.ds(tile * ROWS, ROWS)

        def columns(begin, size):
            return arrays.query.at[work_item.token, rows, pl.ds(begin, size)]

        full = barriers.query_full
        plgpu.copy_gmem_to_smem(columns(VALUE_DIM, REST), memory.query_rest.at[0], full)
        for half in range(2):
            plgpu.copy_gmem_to_smem(columns(half * HALF, HALF), memory.query.at[half], full)
        return ()

    work_items(visit, ())


def load_keys(config: KernelConfig, arrays, work_items, columns, rooms):
    """Some columns of the keys of every step, into the rooms of even and of odd steps in turn."""
    size, pages = min(config.block_size, KEYS), range(config.pages)

    def visit(work_item, index, _):
        def load_step(step, ids, room, full, free):
            @pl.when(work_item.done + step >= 2)
            def wait_for_room():
                plgpu.barrier_wait(free)

            for page, block in enumerate(ids):
                rows = source(config, work_item, step, block)
                target = room.at[pl.ds(page * size, size)]
                keys = arrays.latents.at[*rows, 0, columns]
                plgpu.copy_gmem_to_smem(keys, target, full, collective_axes="mate")

        def pair(i, ids):
            for slot in range(2):
                step = 2 * i + slot
                new = block_ids(config, arrays, work_item, step + 1, pages)
                load_step(step, ids, *rooms[slot])
                ids = new
            return ids

        first = block_ids(config, arrays, work_item, jnp.int32(0), pages)
        lax.fori_loop(0, lax.div(work_item.steps, jnp.int32(2)), pair, first)
        return ()

    work_items(visit, ())

"""The warpgroup that loads: a warp each for the halves of the values, the rest, and the queries.

Their buffers become free at different times, so none waits for another's.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu

from ..kernel_config import ROWS, VALUE_DIM, KernelConfig
from ..pages import each_step, source
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
    size, pages = config.page_keys, range(config.pages)

    def load_step(work_item, step, blocks, turn):
        room, full, free = rooms[turn]

        @pl.when(work_item.done + step >= 2)
        def wait_for_room():
            plgpu.barrier_wait(free)

        for page, block in enumerate(blocks):
            rows = source(config, work_item, step, block)
            target = room.at[pl.ds(page * size, size)]
            keys = arrays.latents.at[*rows, 0, columns]
            plgpu.copy_gmem_to_smem(keys, target, full, collective_axes="mate")

    each_step(config, arrays, work_items, pages, load_step)

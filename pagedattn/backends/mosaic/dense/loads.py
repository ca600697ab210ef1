"""The warpgroup that loads: queries by units, keys and values by pages, one TMA each.

Its four warps share the pages of a step: one that loaded them all would issue too slowly for pages
of 16. Table entries are looked up a step ahead: a load from the table takes longer than a TMA. It
comes behind the TMA, which would else wait for it.
"""

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ...._arrays.namespace import cdiv
from ..ring import Ring
from ..warpgroup import WARPS
from .kernel_config import UNIT, WARPGROUP, KernelConfig, columns
from .tiles import first_key, num_units, token_of


def load(config: KernelConfig, arrays, memory, barriers, schedule):
    """Fills the rings for every tile of this program, in the order in which they are consumed."""
    plgpu.set_max_registers(40, action="decrease")

    @plgpu.warp_map
    def one_of_four(warp):
        def load_tile(task, following, has_next, started):
            _load_queries(config, arrays, memory, barriers, task, warp)
            Loads(config, arrays, memory, barriers, warp, task).all()
            return started

        schedule(lambda task: (), load_tile)


def _load_queries(config, arrays, memory, barriers, task, warp):
    index, tile, head = task.index, task.tile, task.head
    slot = lax.rem(index, jnp.int32(config.query_slots))

    @pl.when(index >= config.query_slots)
    def wait_for_room():
        plgpu.barrier_wait(barriers.query_free.at[slot])

    last = num_units(config, tile.query_len) - 1
    mine = cdiv(config.units, WARPS)

    def load_unit(place):
        unit = jnp.minimum(tile.first_unit + place, last)
        token = tile.begin + token_of(tile.query_len, lax.div(unit, jnp.int32(config.group)))
        member = head * config.group + lax.rem(unit, jnp.int32(config.group))
        half, row = lax.div(place, WARPGROUP // UNIT), lax.rem(place, WARPGROUP // UNIT)
        for j in range(parts := memory.units.shape[3]):
            rows = arrays.query.at[pl.ds(token, UNIT), member, columns(config, j, parts)]
            room = memory.units.at[slot, half, row, j]
            plgpu.copy_gmem_to_smem(rows, room, barriers.query_full.at[slot])

    for i in range(mine):
        place = warp * mine + i
        if config.units % WARPS:
            pl.when(place < config.units)(functools.partial(load_unit, place))
        else:
            load_unit(place)


class Loads:
    """The keys and values of one tile, by one warp."""

    def __init__(self, config, arrays, memory, barriers, warp, task):
        self.config, self.arrays, self.memory, self.barriers = config, arrays, memory, barriers
        self.warp, self.tile, self.blocks = warp, task.tile, task.blocks
        self.head, self.done = task.head, task.done
        self.rows = min(config.block_size, config.keys)
        self.mine = cdiv(config.pages, WARPS)

    def all(self):
        """Keys are a step ahead of values, as their use is."""

        def step_of_loads(step, carry):
            previous, ids = carry
            self.keys(step, ids)
            self.values(step - 1, previous)
            return ids, self.ids(step + 1)

        first = self.ids(jnp.int32(0))
        self.keys(jnp.int32(0), first)
        begin = first, self.ids(jnp.int32(1))
        previous, _ = lax.fori_loop(1, self.blocks.count, step_of_loads, begin)
        self.values(self.blocks.count - 1, previous)

    def page(self, i):
        """Which page of a step is the i-th of this warp."""
        return self.warp + i * WARPS

    def begin(self, step, i):
        """The position of the first key of a page."""
        return (self.blocks.last - step) * self.config.keys + self.page(i) * self.rows

    def ids(self, step):
        return [self.block_id(jnp.maximum(self.begin(step, i), 0)) for i in range(self.mine)]

    def block_id(self, begin):
        """One past the cache for what no query sees: TMA fills it with zeros."""
        config, tile = self.config, self.tile
        index = jnp.minimum(lax.div(begin, jnp.int32(config.block_size)), config.max_blocks - 1)
        row = jnp.minimum(tile.sequence, config.num_seqs - 1)
        seen = (begin < tile.key_len) & (begin + self.rows > first_key(config, tile))
        return jnp.where(seen, self.arrays.tables[row, index], config.num_blocks)

    def keys(self, step, ids):
        ring = Ring(self.memory.key, self.barriers.key_full, self.barriers.key_free)
        slot = ring.free_slot(self.done + step)
        room, full = ring.room.at[slot], ring.full.at[slot]
        self.arrive_without_pages(full)
        for i, block in enumerate(ids):
            load = functools.partial(self.whole_page, self.arrays.key, room, full, step, i, block)
            pl.when(self.page(i) < self.config.pages)(load)

    def arrive_without_pages(self, full):
        """A warp without pages arrives too, so that no ring turns twice while it is behind.

        It waits by the parity of a phase, so it would take the phase after the next for its own.
        """
        if self.config.pages < WARPS:
            pl.when(self.warp >= self.config.pages)(lambda: plgpu.barrier_arrive(full))

    def source(self, array, step, block):
        """The part of a block that one load brings: all of it, or the keys of a step."""
        if (parts := self.config.block_size // self.config.keys) <= 1:
            return array.at[block, :, self.head]
        part = lax.rem(jnp.maximum(self.blocks.last - step, 0), jnp.int32(parts))
        return array.at[block, pl.ds(part * self.config.keys, self.config.keys), self.head]

    def whole_page(self, array, room, full, step, i, block):
        page = self.page(i) if self.config.pages > 1 else 0
        target = room.at[pl.ds(page * self.rows, self.rows)]
        plgpu.copy_gmem_to_smem(self.source(array, step, block), target, full)

    def values(self, step, ids):
        ring = Ring(self.memory.value, self.barriers.value_full, self.barriers.value_free)
        slot = ring.free_slot(self.done + step)
        room, full = ring.room.at[slot], ring.full.at[slot]
        self.arrive_without_pages(full)
        edges = self.edges(step)
        for i, block in enumerate(ids):
            load = functools.partial(self.whole_page, self.arrays.value, room, full, step, i, block)
            pl.when((self.page(i) < self.config.pages) & is_whole(edges, self.page(i)))(load)
        for page, inside in edges:
            rows = functools.partial(self.page_by_rows, slot, full, step, page)
            pl.when(inside)(rows)

    def edges(self, step):
        """The pages of a step of which queries see only a part, and whether there are such."""
        first, end = first_key(self.config, self.tile), self.tile.key_len
        edges = [self.edge(step, end)]
        if self.config.spec.sliding_window is not None:
            page, inside = self.edge(step, first)
            edges.append((page, inside & is_whole(edges, page)))
        return edges

    def edge(self, step, position):
        rows = jnp.int32(self.rows)
        page = lax.div(position, rows) - (self.blocks.last - step) * self.config.pages
        inside = (page >= 0) & (page < self.config.pages) & (lax.rem(position, rows) > 0)
        return page, inside

    def page_by_rows(self, slot, full, step, page):
        """Zeros for the values that no query sees: a weight of 0 leaves NaN as it is."""
        begin = (self.blocks.last - step) * self.config.keys + page * self.rows
        block = self.block_id(begin)
        first = lax.rem(begin, jnp.int32(self.config.block_size))

        def load_row(i, _):
            row = i * WARPS + self.warp
            self.row(slot, page * self.rows + row, block, first + row, begin + row)

        lax.fori_loop(0, self.rows // WARPS, load_row, None)
        plgpu.barrier_wait(self.barriers.edge)

        @pl.when(self.warp == 0)
        def the_page_is_there():
            plgpu.barrier_arrive(full)

    def row(self, slot, target, block, source, position):
        seen = (position >= first_key(self.config, self.tile)) & (position < self.tile.key_len)
        block = jnp.where(seen, block, self.config.num_blocks)
        room = self.memory.value_rows.at[slot, lax.div(target, UNIT)]
        for j in range(parts := room.shape[0]):
            part = columns(self.config, j, parts)
            values = self.arrays.value.at[block, pl.ds(source, 1), self.head, part]
            target_row = room.at[j, pl.ds(lax.rem(target, UNIT), 1)]
            plgpu.copy_gmem_to_smem(values, target_row, self.barriers.edge)


def is_whole(edges, page):
    """Whether a page is none of the edges."""
    return sum(jnp.where(inside & (page == edge), 1, 0) for edge, inside in edges) == 0

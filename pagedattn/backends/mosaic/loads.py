"""The warpgroup that loads: queries by units, keys and values by pages, one TMA each."""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .shape import UNIT, UNITS, WARPGROUP, Shape, piece
from .tiles import KeyBlocks, Tile, first_key, num_units, token_of

CLEARED = 32  # rows that are read, cleared and written back at once


def load(shape: Shape, arrays, memory, barriers, work):
    """Fills the rings for every tile of this program, in the order in which they are consumed."""
    plgpu.set_max_registers(40, action="decrease")

    def tile_of_work(index, tile: Tile, blocks: KeyBlocks, head, done):
        _load_queries(shape, arrays, memory, barriers, tile, head, index)
        _load_keys_and_values(shape, arrays, memory, barriers, tile, blocks, head, done)

    work(tile_of_work)


def _load_queries(shape, arrays, memory, barriers, tile, head, index):
    slot = lax.rem(index, jnp.int32(shape.query_slots))

    @pl.when(index >= shape.query_slots)
    def wait_for_room():
        plgpu.barrier_wait(barriers.query_free.at[slot])

    last = num_units(shape, tile.query_len) - 1
    for i in range(UNITS):
        unit = jnp.minimum(tile.first_unit + i, last)
        token = tile.begin + token_of(tile.query_len, lax.div(unit, jnp.int32(shape.group)))
        member = head * shape.group + lax.rem(unit, jnp.int32(shape.group))
        room = memory.units.at[slot, i * UNIT // WARPGROUP, i % (WARPGROUP // UNIT)]
        for j in range(room.shape[0]):
            rows = arrays.query.at[pl.ds(token, UNIT), member, piece(shape, j)]
            plgpu.copy_gmem_to_smem(rows, room.at[j], barriers.query_full.at[slot])


def _load_keys_and_values(shape, arrays, memory, barriers, tile, blocks, head, done):
    """Keys are a step ahead of values, as their use is."""

    def ids(step):  # looked up a step ahead: a load from the table takes longer than a TMA's issue
        return _block_ids(shape, arrays.tables, tile, blocks.last - step)

    def keys(step, pages):
        slot = _slot(shape, barriers.key_free, done + step)
        _fetch(shape, arrays.key, memory.key.at[slot], barriers.key_full.at[slot], pages, head)

    def values(step, pages):
        slot = _slot(shape, barriers.value_free, done + step)
        begin = (blocks.last - step) * shape.keys
        seen = first_key(shape, tile) - begin, tile.key_len - begin
        ragged = (seen[0] > 0) | _inside_a_page(shape, seen[1])
        room, full = memory.value.at[slot], barriers.value_full.at[slot]

        @pl.when(ragged)
        def last_of_sequence():
            _fetch(shape, arrays.value, room, barriers.tail, pages, head)
            plgpu.barrier_wait(barriers.tail)
            _clear_outside(shape, room, *seen)
            for _ in pages:
                plgpu.barrier_arrive(full)

        @pl.when(jnp.logical_not(ragged))
        def whole_pages():
            _fetch(shape, arrays.value, room, full, pages, head)

    def step_of_loads(step, carry):
        previous, pages = carry
        ahead = ids(step + 1)
        keys(step, pages)
        values(step - 1, previous)
        return pages, ahead

    first = ids(jnp.int32(0))
    second = ids(jnp.int32(1))
    keys(jnp.int32(0), first)
    previous, _ = lax.fori_loop(1, blocks.count, step_of_loads, (first, second))
    values(blocks.count - 1, previous)


def _slot(shape, free, step):
    """The slot of a step, once what was there is no longer needed."""
    slot = lax.rem(step, jnp.int32(shape.stages))

    @pl.when(step >= shape.stages)
    def wait_for_room():
        plgpu.barrier_wait(free.at[slot])

    return slot


def _block_ids(shape, tables, tile, block):
    """One id past the cache for what lies past the sequence: TMA fills it with zeros."""
    ids = []
    for i in range(shape.pages):
        begin = jnp.maximum(block, 0) * shape.keys + i * shape.block_size
        index = jnp.minimum(lax.div(begin, jnp.int32(shape.block_size)), shape.max_blocks - 1)
        row = jnp.minimum(tile.sequence, shape.num_seqs - 1)
        ids.append(jnp.where(begin < tile.key_len, tables[row, index], shape.num_blocks))
    return ids


def _inside_a_page(shape, end):
    """Whether a row of a step is no end of a page: what follows a page is filled with zeros."""
    rows = jnp.int32(min(shape.block_size, shape.keys))
    return (end > 0) & (end < shape.keys) & (lax.rem(end, rows) > 0)


def _clear_outside(shape, room, begin, end):
    """Zeros for the values that no query of a sequence sees: a weight of 0 leaves NaN as it is."""
    size = CLEARED, shape.head_dim
    layout = plgpu.Layout.SMEM_GMEM_COPY(size, room.dtype, shape.swizzle)
    row = plgpu.broadcasted_iota(jnp.int32, size, 0, layout=layout)
    for i in range(0, shape.keys, CLEARED):

        @pl.when((begin > i) | (end < i + CLEARED))
        def clear(i=i):
            rows = room.at[pl.ds(i, CLEARED)]
            values = plgpu.load(rows, layout=layout)
            seen = (row >= begin - i) & (row < end - i)
            rows[...] = jnp.where(seen, values, jnp.zeros(size, room.dtype))

    plgpu.commit_smem()


def _fetch(shape, array, slot, barrier, ids, head):
    rows = min(shape.block_size, shape.keys)
    for i, block in enumerate(ids):
        page = array.at[block, :, head]
        plgpu.copy_gmem_to_smem(page, slot.at[pl.ds(i * rows, rows)], barrier)

"""Where a warpgroup's rows go: by units, or row by row where a sequence is shorter than a unit."""

import math

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .float16 import weight_exponent
from .kernel_config import ROWS, UNIT, WARPGROUP, KernelConfig, columns
from .registers import LAYOUT, load, wide
from .scores import Softmax
from .tiles import Tile, counts_of, has_rows, num_units, sequences, token_of


def store(
    config: KernelConfig, arrays, memory, tile: Tile, head, slot, warpgroup, scale, out, state
):
    """Results, times a scale, pass through the memory of the tile's queries, free by then."""
    some = state.total > 0
    share = jnp.where(some, scale / jnp.where(some, state.total, 1.0), 0.0)
    out = (out * wide(share, out)).astype(memory.results.dtype)
    plgpu.commit_smem()  # all warps have read their queries
    memory.results.at[slot, warpgroup][...] = out
    plgpu.commit_smem()
    staged = memory.units.at[slot, warpgroup]
    whole = tile.query_len >= UNIT

    @pl.when(whole)
    def units():
        _store_units(config, arrays, tile, head, warpgroup, staged)

    @pl.when(jnp.logical_not(whole))
    def rows():
        _store_rows(config, arrays, tile, head, warpgroup, staged)

    if config.with_lse:
        _store_lse(arrays, memory, tile, head, warpgroup, state)


def _place(config, tile, head, unit):
    token = token_of(tile.query_len, lax.div(unit, jnp.int32(config.group)))
    return tile.begin + token, head * config.group + lax.rem(unit, jnp.int32(config.group))


def _store_units(config, arrays, tile, head, warpgroup, staged):
    last = num_units(config, tile.query_len) - 1
    for i in range(WARPGROUP // UNIT):
        unit = tile.first_unit + warpgroup * (WARPGROUP // UNIT) + i

        @pl.when(unit <= last)
        def unit_of_rows(i=i, unit=unit):
            token, member = _place(config, tile, head, unit)
            for j in range(parts := staged.shape[1]):
                rows = arrays.out.at[pl.ds(token, UNIT), member, columns(config, j, parts)]
                plgpu.copy_smem_to_gmem(staged.at[i, j], rows)


def _store_rows(config, arrays, tile, head, warpgroup, staged):
    first = tile.first_unit + warpgroup * (WARPGROUP // UNIT)
    count = jnp.clip(num_units(config, tile.query_len) - first, 0, WARPGROUP // UNIT)

    def row(i, _):
        unit, offset = lax.div(i, tile.query_len), lax.rem(i, tile.query_len)
        token, member = _place(config, tile, head, first + unit)
        for j in range(parts := staged.shape[1]):
            part = columns(config, j, parts)
            target = arrays.out.at[pl.ds(token + offset, 1), member, part]
            plgpu.copy_smem_to_gmem(staged.at[unit, j, pl.ds(offset, 1)], target)

    lax.fori_loop(0, count * tile.query_len, row, None)


def _store_lse(arrays, memory, tile, head, warpgroup, state):
    staged = memory.lse.at[pl.ds(warpgroup * WARPGROUP, WARPGROUP)]
    top = state.top - weight_exponent(memory.value.dtype)
    staged[...] = (top + jnp.log2(state.total)) * math.log(2)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staged, arrays.lse.at[tile.slot, head, warpgroup])


def by_token(config: KernelConfig, query_start_loc, seq_lens, lse):
    """`f32[num_tokens, num_heads]` from `f32[max_tiles, num_kv_heads, 2, 64]`."""
    begins, query_lens, _ = sequences(config, query_start_loc, seq_lens)
    token = jnp.arange(config.num_tokens, dtype=jnp.int32)
    seq = jnp.sum(token[:, None] >= (begins + query_lens)[None, :], axis=1, dtype=jnp.int32)
    seq = jnp.minimum(seq, len(begins) - 1)
    index = token - begins[seq]
    block = lax.div(index, jnp.int32(UNIT))
    row = index - token_of(query_lens[seq], block)
    head = jnp.arange(config.num_heads, dtype=jnp.int32)
    unit = block[:, None] * config.group + head % config.group
    slot = first_tile(config, query_lens, seq)[:, None] + unit // config.units
    place = unit % config.units * UNIT + row[:, None]
    tiles = lse.reshape(config.max_tiles, config.num_kv_heads, ROWS)
    return tiles.at[slot, head // config.group, place].get(mode="clip")


def first_tile(config: KernelConfig, query_lens, seq):
    """The number of the first tile of each of some sequences."""
    if config.parts:
        return seq
    counts = counts_of(config, query_lens)
    return (jnp.cumsum(counts) - counts)[seq]


def join_or_leave(config: KernelConfig, arrays, task, warpgroup, out, state: Softmax, store):
    """Stores the results of a tile that begins with a task, leaves those of another to its tile."""
    out, state = with_the_rest(config, arrays, task, warpgroup, out, state)

    @pl.when(jnp.logical_not(task.work_item.is_rest))
    def whole():
        store(out, state)

    @pl.when(task.work_item.is_rest)
    def rest():
        leave(config, arrays, task, warpgroup, out, state)


def leave(config: KernelConfig, arrays, task, warpgroup, out, state: Softmax):
    """Leaves the sums of a work item for the part in which its tile begins."""

    @pl.when(has_rows(config, task.tile, warpgroup))
    def rows():
        place = task.work_item.part, task.head, warpgroup
        arrays.part_out.at[place][...] = out
        for i, values in enumerate(state):
            arrays.part_state.at[*place, i][...] = values
        plgpu.commit_smem()  # all warps have written, before one of them says so
        plgpu.semaphore_signal(arrays.finished.at[place], memory_scope="gpu")


def with_the_rest(config: KernelConfig, arrays, task, warpgroup, out, state: Softmax):
    """The sums of a work item, and of those behind it if its tile goes on in other parts."""

    def join(part, carry):
        place = part, task.head, warpgroup
        plgpu.semaphore_wait(arrays.finished.at[place], memory_scope="gpu")
        top, total = (load(arrays.part_state.at[*place, i], LAYOUT.reduce(1)) for i in range(2))
        other_out = load(arrays.part_out.at[place], LAYOUT)
        out, state = carry
        return joined(out, state, other_out, Softmax(top, total))

    work_item = task.work_item
    waits = work_item.goes_on & has_rows(config, task.tile, warpgroup)
    end = jnp.where(waits, work_item.last, work_item.part) + 1
    return lax.fori_loop(work_item.part + 1, end, join, (out, state))


def joined(out, state: Softmax, other_out, other: Softmax):
    top = jnp.maximum(state.top, other.top)
    base = jnp.where(top == -jnp.inf, 0.0, top)
    here, there = jnp.exp2(state.top - base), jnp.exp2(other.top - base)
    out = out * wide(here, out) + other_out * wide(there, out)
    return out, Softmax(top, state.total * here + other.total * there)

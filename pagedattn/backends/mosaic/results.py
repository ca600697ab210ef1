"""Where a warpgroup's rows go: by units, or row by row where a sequence is shorter than a unit."""

import math

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from . import scores
from .shape import UNIT, WARPGROUP, Shape, piece
from .tiles import Tile, num_units, token_of


def store(shape: Shape, arrays, memory, tile: Tile, head, slot, warpgroup, out, state):
    """Results pass through the memory of the tile's queries, which is free by then."""
    some = state.total > 0
    share = jnp.where(some, 1 / jnp.where(some, state.total, 1.0), 0.0)
    out = (out * scores.wide(share, out)).astype(memory.query.dtype)
    plgpu.commit_smem()  # all warps have read their queries
    memory.query.at[slot, warpgroup][...] = out
    plgpu.commit_smem()
    staged = memory.units.at[slot, warpgroup]
    whole = tile.query_len >= UNIT

    @pl.when(whole)
    def units():
        _store_units(shape, arrays, tile, head, warpgroup, staged)

    @pl.when(jnp.logical_not(whole))
    def rows():
        _store_rows(shape, arrays, tile, head, warpgroup, staged)

    if shape.with_lse:
        _store_lse(shape, arrays, memory, tile, head, warpgroup, state)


def _place(shape, tile, head, unit):
    token = token_of(tile.query_len, lax.div(unit, jnp.int32(shape.group)))
    return tile.begin + token, head * shape.group + lax.rem(unit, jnp.int32(shape.group))


def _store_units(shape, arrays, tile, head, warpgroup, staged):
    last = num_units(shape, tile.query_len) - 1
    for i in range(WARPGROUP // UNIT):
        unit = tile.first_unit + warpgroup * (WARPGROUP // UNIT) + i

        @pl.when(unit <= last)
        def unit_of_rows(i=i, unit=unit):
            token, member = _place(shape, tile, head, unit)
            for j in range(staged.shape[1]):
                rows = arrays.out.at[pl.ds(token, UNIT), member, piece(shape, j)]
                plgpu.copy_smem_to_gmem(staged.at[i, j], rows)


def _store_rows(shape, arrays, tile, head, warpgroup, staged):
    first = tile.first_unit + warpgroup * (WARPGROUP // UNIT)
    count = jnp.clip(num_units(shape, tile.query_len) - first, 0, WARPGROUP // UNIT)

    def row(i, _):
        unit, offset = lax.div(i, tile.query_len), lax.rem(i, tile.query_len)
        token, member = _place(shape, tile, head, first + unit)
        for j in range(staged.shape[1]):
            target = arrays.out.at[pl.ds(token + offset, 1), member, piece(shape, j)]
            plgpu.copy_smem_to_gmem(staged.at[unit, j, pl.ds(offset, 1)], target)

    lax.fori_loop(0, count * tile.query_len, row, None)


def _store_lse(shape, arrays, memory, tile, head, warpgroup, state):
    staged = memory.lse.at[warpgroup]
    staged[...] = (state.top + jnp.log2(state.total)) * math.log(2)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staged, arrays.lse.at[tile.slot, head, warpgroup])

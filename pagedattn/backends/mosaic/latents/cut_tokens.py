"""Tokens whose keys were cut: parts leave their sums to the part in which the token begins.

A part begins with what it leaves to others, and waits for theirs when all else is done.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ..dense.registers import load, store
from .softmax import LAYOUT, finite, wide


class Sums(NamedTuple):
    """Of each head.

    Fields:
      values: sums of weighted values: some matrices.
      top: about the largest logit.
      total: the sum of the weights relative to it.
    """

    values: tuple[Any, ...]
    top: Any
    total: Any


class Places(NamedTuple):
    """Where the sums of a tile of heads are left.

    Fields:
      tile, warpgroup: whose sums.
      parts: of each matrix of the values, where it lies among all.
      axis: of heads, in these matrices.
    """

    tile: Any
    warpgroup: Any  # may be traced
    parts: tuple[Any, ...]
    axis: int


def finish(arrays, work_item, places: Places, sums: Sums, put: Callable[[Sums], None]):
    """Joins what others left; puts it where results go, or leaves it to others."""
    sums = joined(arrays, work_item, places, sums)
    begins = work_item.part == work_item.first_part

    @pl.when(begins)
    def whole():
        put(sums)

    @pl.when(jnp.logical_not(begins))
    def rest():
        leave(arrays, (work_item.part, places.tile, places.warpgroup), places, sums)


def leave(arrays, place, places: Places, sums: Sums):
    for part, values in zip(places.parts, sums.values, strict=True):
        arrays.part_sums.at[*place, *part][...] = values
    for i, numbers in enumerate((sums.top, sums.total)):
        store(arrays.part_state.at[*place, i], numbers)
    plgpu.commit_smem()  # all warps have written, before one of them says so
    plgpu.semaphore_signal(arrays.finished.at[place], memory_scope="gpu")


def joined(arrays, work_item, places: Places, sums: Sums) -> Sums:
    """The sums of a work item and of those behind it, as a tree: of 1, 2, 4, ... parts."""
    index = work_item.part - work_item.first_part
    behind = work_item.last_part - work_item.part

    def next_is_mine(carry):
        distance, _ = carry
        return (lax.rem(index, 2 * distance) == 0) & (distance <= behind)

    def join(carry):
        distance, sums = carry
        place = work_item.part + distance, places.tile, places.warpgroup
        plgpu.semaphore_wait(arrays.finished.at[place], memory_scope="gpu")
        return 2 * distance, added(sums, arrays, place, places)

    _, sums = lax.while_loop(next_is_mine, join, (jnp.int32(1), sums))
    return sums


def added(sums: Sums, arrays, place, places: Places) -> Sums:
    """The sums, and those that another part has left in a place."""
    numbers = LAYOUT.reduce(1 - places.axis)
    top, total = (load(arrays.part_state.at[*place, i], numbers) for i in range(2))
    both = jnp.maximum(sums.top, top)
    here, there = (jnp.exp2(x - finite(both)) for x in (sums.top, top))

    def values(part, mine):
        other = load(arrays.part_sums.at[*place, *part], LAYOUT)
        return mine * wide(here, mine, places.axis) + other * wide(there, mine, places.axis)

    both_values = tuple(map(values, places.parts, sums.values))
    return Sums(both_values, both, sums.total * here + total * there)


def normalised(sums: Sums, axis: int):
    """The weighted means of the values, and lse, of the sums of all keys."""
    some = sums.total > 0
    share = jnp.where(some, 1 / jnp.where(some, sums.total, 1.0), 0.0)
    means = tuple(values * wide(share, values, axis) for values in sums.values)
    return means, (sums.top + jnp.log2(sums.total)) * math.log(2)

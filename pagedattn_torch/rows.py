"""Rows of a tensor set in place, but those whose index is out of range.

Where they go is worked out once, for both planes of a cache and for the layers of a step.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Integer, Shaped
from torch import Tensor


class HostRows(NamedTuple):
    """On a CPU: the rows that are set, and where."""

    index: tuple[Int[Tensor, "num_kept"], ...]
    kept: Int[Tensor, "num_kept"]

    def put_(self, array: Shaped[Tensor, "..."], rows: Shaped[Tensor, "num_rows ..."]) -> None:
        array.index_put_(self.index, rows[self.kept])


class DeviceRows(NamedTuple):
    """On a GPU, which selecting rows would wait for: dropped rows repeat the write of a live one,
    or, if there is none, write back what stands in the array's first row."""

    index: tuple[Int[Tensor, "num_rows"], ...]
    live: Bool[Tensor, "num_rows"]
    first: Int[Tensor, ""]  # the first live row
    some: Bool[Tensor, ""]  # whether there is one

    def put_(self, array: Shaped[Tensor, "..."], rows: Shaped[Tensor, "num_rows ..."]) -> None:
        if not len(rows):
            return
        at_first = tuple(axis[self.first] for axis in self.index)
        spare = torch.where(self.some, rows[self.first], array[at_first])
        live = self.live.view(-1, *[1] * (rows.ndim - 1))
        array.index_put_(self.index, torch.where(live, rows, spare))


def row_index(
    axes: tuple[Int[Tensor, "num_rows"], ...], live: Bool[Tensor, "num_rows"]
) -> HostRows | DeviceRows:
    """Where rows go: an index for each leading axis of the array, of those that are live."""
    if live.device.type == "cpu":
        kept = live.nonzero().flatten()
        return HostRows(tuple(axis[kept] for axis in axes), kept)
    if not len(live):
        return DeviceRows(axes, live, live, live)
    first, some = live.int().argmax(), live.any()
    spare = tuple(torch.where(some, axis[first], 0) for axis in axes)
    index = tuple(torch.where(live, axis, s) for axis, s in zip(axes, spare, strict=True))
    return DeviceRows(index, live, first, some)


def slot_index(
    slots: Integer[Tensor, "num_rows"], num_slots: int, block_size: int
) -> HostRows | DeviceRows:
    """Where the rows of new tokens go in a plane `[num_blocks, block_size, ...]`."""
    slots = slots.to(torch.int64)
    live = (slots >= 0) & (slots < num_slots)
    return row_index((slots // block_size, slots % block_size), live)

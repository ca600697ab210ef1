"""Rows of a tensor set in place, but those whose index is out of range.

Where they go is worked out once, for both planes of a cache and for the layers of a step.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class HostRows(NamedTuple):
    """On a CPU: the rows that are set, and where."""

    index: tuple[Tensor, ...]
    kept: Tensor

    def put_(self, array: Tensor, rows: Tensor) -> None:
        array.index_put_(self.index, rows[self.kept])


class DeviceRows(NamedTuple):
    """On a GPU, which selecting rows would wait for: dropped rows repeat the write of a live one,
    or, if there is none, write back what stands in the array's first row."""

    index: tuple[Tensor, ...]
    live: Tensor
    first: Tensor  # the first live row, [1]: an index without dimensions would be read by the host
    some: Tensor  # whether there is one

    def put_(self, array: Tensor, rows: Tensor) -> None:
        if not len(rows):
            return
        at_first = tuple(axis[self.first] for axis in self.index)
        spare = torch.where(self.some, rows[self.first], array[at_first])
        live = self.live.view(-1, *[1] * (rows.ndim - 1))
        array.index_put_(self.index, torch.where(live, rows, spare))


def row_index(axes: tuple[Tensor, ...], live: Tensor) -> HostRows | DeviceRows:
    """Where rows go: an index for each leading axis of the array, of those that are live."""
    if live.device.type == "cpu":
        kept = live.nonzero().flatten()
        return HostRows(tuple(axis[kept] for axis in axes), kept)
    if not len(live):
        return DeviceRows(axes, live, live, live)
    first, some = live.int().argmax(0, keepdim=True), live.any()
    spare = tuple(torch.where(some, axis[first], 0) for axis in axes)
    index = tuple(torch.where(live, axis, s) for axis, s in zip(axes, spare, strict=True))
    return DeviceRows(index, live, first, some)


def slot_index(slots: Tensor, num_slots: int, block_size: int) -> HostRows | DeviceRows:
    """Where the rows of new tokens go in a plane `[num_blocks, block_size, ...]`."""
    slots = slots.to(torch.int64)
    live = (slots >= 0) & (slots < num_slots)
    return row_index((slots // block_size, slots % block_size), live)

"""Setting rows of a tensor in place; rows whose index is out of range are dropped.

Where rows go is worked out once, for the keys, the values and all layers of a step.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Integer, Shaped
from torch import Tensor


class HostRows(NamedTuple):
    """Where rows go, on a CPU: `kept` are the rows that are set, `index` is where each goes."""

    index: tuple[Int[Tensor, "num_kept"], ...]
    kept: Int[Tensor, "num_kept"]

    def put_(self, array: Shaped[Tensor, "..."], rows: Shaped[Tensor, "num_rows ..."]) -> None:
        array.index_put_(self.index, rows[self.kept])


class DeviceRows(NamedTuple):
    """Where rows go, on a GPU. All rows are written, since selecting some would wait for the GPU.

    A row to drop repeats the write of the first live row. If no row is live, it writes the array's
    first row back to where it is.
    """

    index: tuple[Int[Tensor, "num_rows"], ...]
    live: Bool[Tensor, "num_rows"]
    first: Int[Tensor, "1"]  # the number of the first live row; of no dimension it would be read
    some: Bool[Tensor, ""]  # whether any row is live

    def put_(self, array: Shaped[Tensor, "..."], rows: Shaped[Tensor, "num_rows ..."]) -> None:
        if not len(rows) or not len(array):
            return
        at_first = tuple(axis[self.first] for axis in self.index)
        spare = torch.where(self.some, rows[self.first], array[at_first])
        live = self.live.view(-1, *[1] * (rows.ndim - 1))
        array.index_put_(self.index, torch.where(live, rows, spare))


def row_index(
    axes: tuple[Int[Tensor, "num_rows"], ...], live: Bool[Tensor, "num_rows"]
) -> HostRows | DeviceRows:
    """Where rows go: `axes` index the leading axes of the array; rows not `live` are dropped."""
    if live.device.type == "cpu":
        kept = live.nonzero().flatten()
        return HostRows(tuple(axis[kept] for axis in axes), kept)
    if not len(live):
        return DeviceRows(axes, live, live, live)
    first, some = live.int().argmax(0, keepdim=True), live.any()
    spare = tuple(torch.where(some, axis[first], 0) for axis in axes)
    index = tuple(torch.where(live, axis, s) for axis, s in zip(axes, spare, strict=True))
    return DeviceRows(index, live, first, some)


def slot_index(
    slots: Integer[Tensor, "num_rows"], num_slots: int, block_size: int
) -> HostRows | DeviceRows:
    """Where the rows of new tokens go in a key or value cache `[num_blocks, block_size, ...]`."""
    slots = slots.to(torch.int64)
    live = (slots >= 0) & (slots < num_slots)
    return row_index((slots // block_size, slots % block_size), live)

"""Setting rows of a tensor in place; rows whose index is out of range are dropped.

Where rows go is worked out once, for the keys, the values and all layers of a step.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Integer, Shaped
from torch import Tensor


def run_of(ids: Integer[Tensor, "..."]) -> slice | None:
    """The ids as a slice, if they are known here and each is the one before it plus 1.

    What a slice names is read in place, or is copied several times as fast.

    >>> run_of(torch.tensor([[3, 4], [5, 6]])), run_of(torch.tensor([3, 5]))
    (slice(3, 7, None), None)
    """
    if ids.device.type != "cpu" or not ids.numel():
        return None
    flat = ids.flatten()
    first, last = int(flat[0]), int(flat[-1])
    if last - first + 1 != len(flat) or not (flat.diff() == 1).all():
        return None
    return slice(first, last + 1)


class HostRows(NamedTuple):
    """Where rows go, on a CPU.

    Fields:
      index: where each row that is set goes, by the leading axes of an array.
      kept: which rows are set; None for all.
      run: the same as `index`, in an array whose leading axes are one; None if it is no slice.
    """

    index: tuple[Int[Tensor, "num_kept"], ...]
    kept: Int[Tensor, "num_kept"] | None
    run: slice | None

    def put_(self, array: Shaped[Tensor, "..."], rows: Shaped[Tensor, "num_rows ..."]) -> None:
        rows = rows if self.kept is None else rows[self.kept]
        axes = len(self.index)
        if self.run is None or (axes == 2 and array.stride(0) != array.shape[1] * array.stride(1)):
            array.index_put_(self.index, rows)
        else:
            array.flatten(0, axes - 1)[self.run].copy_(rows)


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
        if live.all():
            return HostRows(axes, None, run_of(axes[0]) if len(axes) == 1 else None)
        kept = live.nonzero().flatten()
        return HostRows(tuple(axis[kept] for axis in axes), kept, None)
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
    rows = row_index((slots // block_size, slots % block_size), live)
    several = isinstance(rows, HostRows) and rows.kept is None and slots.shape[0] > 1
    return rows._replace(run=run_of(slots)) if several else rows

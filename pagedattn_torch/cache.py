"""The paged cache on torch tensors, updated in place.

Rows whose index is out of range are dropped.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Integer, Shaped
from torch import Tensor

from pagedattn import KVCache
from pagedattn._arrays.memory import bytes_spanned, is_fake, require_alike, require_memory
from pagedattn.cache import validate_writes as validate
from pagedattn.cache.quantise import held

from .arrays import (
    bits,
    on_device_of,
    require_beside,
    require_cache,
    require_tensors,
    require_writable,
    tensor,
)
from .uncompiled import uncompiled


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


@uncompiled
@torch.no_grad()
def write_kv_(
    cache: KVCache,
    key: Float[Tensor, "num_tokens num_kv_heads head_dim"],
    value: Float[Tensor, "num_tokens num_kv_heads value_dim"] | None,
    slot_mapping: Integer[Any, "num_tokens"],
) -> KVCache:
    """Writes the keys and values of new tokens into the cache, in place; slot -1 writes nothing.

    Gradients are not tracked: the cache gets values only, even of tensors that require gradients.
    A quantised cache gets them as `pagedattn.write_kv` writes them. Rows that are views of the
    cache are read as they were before.

    Args:
      value: None for a latent cache.
      slot_mapping: an array of any framework.

    Returns:
      the cache that was given.

    Raises:
      InvalidInputError: not tensors, wrong shapes or dtypes, slots out of range or given
        twice. Slots are checked if they are on the CPU; on a GPU, those outside the cache write
        nothing.

    >>> cache = KVCache(torch.zeros(1, 2, 1, 1), torch.zeros(1, 2, 1, 1))
    >>> write_kv_(cache, torch.ones(1, 1, 1), torch.ones(1, 1, 1), torch.tensor([1])).key.flatten()
    tensor([0., 1.])
    """
    require_cache(cache)
    require_tensors(key=key, **({} if value is None else {"value": value}))
    slots = tensor("slot_mapping", slot_mapping)
    validate.write(cache, key, value, slots)
    require_beside("cache", cache.key, key=key, value=value)
    slots = tensor("slot_mapping", slots, cache.key.device)
    require_planes(cache, key=key, value=value)
    key, *values = apart(cache, key, *([] if value is None else [value]))
    value = values[0] if values else None
    write_rows_(cache, key, value, slot_index(slots, cache.num_slots, cache.block_size))
    return cache


def write_rows_(
    cache: KVCache,
    key: Float[Tensor, "num_tokens num_kv_heads head_dim"],
    value: Float[Tensor, "num_tokens num_kv_heads value_dim"] | None,
    rows: HostRows | DeviceRows,
) -> None:
    """`write_kv_` without its checks, under `torch.no_grad`; never waits for the device."""
    with on_device_of(cache.key):
        for name, tokens in held(cache, (key, value)).items():
            rows.put_(bits(getattr(cache, name)), bits(tokens))


def apart(cache: KVCache, *rows: Tensor) -> list[Tensor]:
    """Rows to write, or copies of those that lie in the cache's memory, as views by anyone do."""
    if is_fake(cache.key):
        return [*rows]
    taken = [_memory(array) for array in cache.by_slot.values()]
    return [new.clone() if _overlaps(new, taken) else new for new in rows]


def _overlaps(rows: Tensor, taken: list[tuple[int, int]]) -> bool:
    start, stop = _memory(rows)
    return any(start < end and begin < stop for begin, end in taken)


def _memory(array: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte, and of the one behind its last."""
    start = array.data_ptr()
    return start, start + bytes_spanned(array)


def require_planes(cache: KVCache, **rows: Tensor | None) -> None:
    """Requires that torch can write rows such as these to every array of a cache.

    Asked before the first write, so keys never stand beside values of others.

    Raises:
      InvalidInputError: it can write to none or to some of them only.
    """
    arrays = {f"the cache's {name}": array for name, array in cache.by_slot.items()}
    require_writable(**arrays)
    require_alike(**arrays, **{name: array for name, array in rows.items() if array is not None})


def require_copies(src_cache: KVCache, dst_cache: KVCache, src: Tensor, dst: Tensor) -> None:
    """Requires that blocks can be copied: ids are read, to leave out those of -1.

    Raises:
      InvalidInputError: wrong shapes or ids, or what has no memory.
    """
    validate.block_copies(src_cache, dst_cache, src, dst)
    require_planes(dst_cache, source=src_cache.key, source_value=src_cache.value)
    arrays = {f"the cache's {name}": array for name, array in dst_cache.by_slot.items()}
    for name, array in {"src": src, "dst": dst, **arrays}.items():
        require_memory(name, array)


@torch.no_grad()
def set_rows_(
    array: Shaped[Tensor, "*shape"],
    indices: Integer[Tensor, "n"],
    rows: Shaped[Tensor, "n *row"],
) -> Shaped[Tensor, "*shape"]:
    """Sets rows of a contiguous array in place; rows whose index is out of range are dropped.

    An index counts rows over all leading axes together. Gradients are not tracked.
    """
    indices = indices.to(torch.int64)
    flat = array.view(-1, *rows.shape[1:])
    live = (indices >= 0) & (indices < len(flat))
    row_index((indices,), live).put_(bits(flat), bits(rows))
    return array


@uncompiled
def copy_blocks_(cache: KVCache, src: Integer[Any, "n"], dst: Integer[Any, "n"]) -> KVCache:
    """Copies block `src[i]` to block `dst[i]` in place; every source is read as it was before.

    A block of -1 copies nothing. The ids may be of any framework; gradients are not tracked.

    Raises:
      InvalidInputError: not tensors, or wrong shapes; ids on the CPU also for blocks outside the
        cache, or one block written twice.

    >>> planes = (torch.arange(3.0).reshape(3, 1, 1, 1) for _ in range(2))
    >>> copy_blocks_(KVCache(*planes), torch.tensor([0, 1]), torch.tensor([1, 2])).key.flatten()
    tensor([0., 0., 1.])
    """
    return swap_blocks_(cache, cache, src, dst)


@uncompiled
@torch.no_grad()
def swap_blocks_(
    src_cache: KVCache, dst_cache: KVCache, src: Integer[Any, "n"], dst: Integer[Any, "n"]
) -> KVCache:
    """Copies block `src[i]` of one cache to block `dst[i]` of another, and returns the latter.

    It is a copy, not an exchange: the name is the usual one for moving blocks to the host and back.
    The caches may be on different devices. Ids and errors are as in `copy_blocks_`.

    >>> here = KVCache(torch.ones(2, 1, 1, 1), torch.ones(2, 1, 1, 1))
    >>> there = KVCache(torch.zeros(2, 1, 1, 1), torch.zeros(2, 1, 1, 1))
    >>> swap_blocks_(here, there, torch.tensor([0]), torch.tensor([1])).key.flatten()
    tensor([0., 1.])
    """
    require_cache(src_cache)
    require_cache(dst_cache)
    src, dst = tensor("src", src), tensor("dst", dst)
    require_copies(src_cache, dst_cache, src, dst)
    src, dst = src.to(torch.int64), dst.to(src.device, torch.int64)
    copied = (src >= 0) & (dst >= 0)
    src, dst = src[copied], dst[copied]
    sources, targets = src_cache.by_slot, dst_cache.by_slot
    for source, target in ((bits(sources[name]), bits(targets[name])) for name in targets):
        with on_device_of(source):
            blocks = source.index_select(0, src.to(source.device)).to(target.device)
        with on_device_of(target):
            target.index_copy_(0, dst.to(target.device), blocks)
    return dst_cache

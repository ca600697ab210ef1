"""Reads what an array or a list holds, to notice a change in place."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pagedattn._arrays.memory import is_fake

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def watch(value: Tensor | np.ndarray | list) -> Callable[[], bool] | None:
    """A function that tells whether a value was changed in place; None where nothing tells.

    On a CPU it reads the values, since NumPy and others can write to the same memory. On a GPU
    that would wait for it: there torch's count of changes tells, which inference tensors lack.

    >>> lengths = torch.tensor([3, 1])
    >>> changed = watch(lengths)
    >>> lengths.numpy()[0] = 4
    >>> changed()
    True
    """
    if isinstance(value, Tensor):
        return _watch_tensor(value)
    if isinstance(value, np.ndarray):
        then = value.tobytes()
        return lambda: value.tobytes() != then
    return _watch_list(value)


def _watch_list(values) -> Callable[[], bool] | None:
    items = [*values]
    watches = [_watch_tensor(item) for item in items if isinstance(item, Tensor)]
    if not watches:
        return lambda: values != items
    if None in watches:
        return None
    same = [*map(id, items)]
    return lambda: same != [*map(id, values)] or any(changed() for changed in watches if changed)


def _watch_tensor(tensor) -> Callable[[], bool] | None:
    on_cpu = tensor.device.type == "cpu"
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    if on_cpu and is_fake(tensor):
        return None
    place = tensor.data_ptr()
    if on_cpu and not tensor.is_neg():
        alias = tensor.detach()
        bits = alias.view(BITS[tensor.itemsize]).numpy()
        then = bits.tobytes()
        # The place first: memory that was freed is not read.
        return lambda: (
            tensor.data_ptr() != place or not tensor.is_set_to(alias) or bits.tobytes() != then
        )
    if tensor.is_inference():
        return None
    version = tensor._version
    return lambda: tensor._version != version or tensor.data_ptr() != place

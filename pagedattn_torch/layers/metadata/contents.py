"""Reads what an array or a list holds, to notice a change in place."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def reader(value: Tensor | np.ndarray | list) -> Callable[[], Any] | None:
    """A function whose result is another one after a change in place; None where nothing tells.

    On a CPU it reads the values, since NumPy and others can write to the same memory. On a GPU
    that would wait for it: there torch's count of changes tells, which inference tensors lack.

    >>> lengths = torch.tensor([3, 1])
    >>> read = reader(lengths)
    >>> then = read()
    >>> lengths.numpy()[0] = 4
    >>> read() == then
    False
    """
    if isinstance(value, np.ndarray):
        return value.tobytes
    return _of_tensor(value) if isinstance(value, Tensor) else _of_list(value)


def _of_list(values) -> Callable[[], Any] | None:
    tensors = [_of_tensor(value) for value in values if isinstance(value, Tensor)]
    if not tensors:
        return lambda: [*values]
    if None in tensors:
        return None
    return lambda: ([*map(id, values)], [read() for read in tensors if read is not None])


def _of_tensor(tensor) -> Callable[[], Any] | None:
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    if tensor.device.type == "cpu" and not tensor.is_neg():
        bits = tensor.detach().view(BITS[tensor.itemsize]).numpy()
        return lambda: (*_place(tensor), bits.tobytes())
    return None if tensor.is_inference() else lambda: (*_place(tensor), tensor._version)


def _place(tensor):
    return tensor.data_ptr(), tensor.shape, tensor.stride()

"""Where an array lies: on which kind of device, and how in its memory."""

import itertools
import operator
from collections.abc import Sequence

import jax

from .facts import is_traced


def device_of(array) -> str:
    """The kind of device an array lies on; of a traced array, the kind of the default device."""
    if hasattr(array, "new_tensor"):
        return array.device.type
    if is_traced(array):
        # JAX makes the attributes of its configuration when it starts.
        default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
        platform = getattr(default, "platform", default) or jax.default_backend()
    else:
        platform = next(iter(array.devices())).platform
    return "cuda" if platform == "gpu" else platform


def strides_of(array) -> tuple[int, ...]:
    """A torch tensor's strides; XLA's arrays are dense, the last axis innermost.

    >>> strides_of(jax.numpy.zeros((2, 3, 4)))
    (12, 4, 1)
    """
    if hasattr(array, "new_tensor"):
        return array.stride()
    inwards = itertools.accumulate(reversed(array.shape[1:]), operator.mul, initial=1)
    return tuple(inwards)[::-1] if array.ndim else ()


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether an array lies in memory in row-major order, without gaps.

    >>> is_dense((2, 1, 3), (3, 99, 1)), is_dense((2, 3), (1, 2))
    (True, False)
    """
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True

"""Where an array lies: on which device, and how in its memory."""

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
from jax.core import Tracer

from ..errors import InvalidInputError, UnsupportedError
from .typing import TorchTensor, is_torch

Fn = TypeVar("Fn", bound=Callable)


def on_one_device(fn: Fn) -> Fn:
    """Refuses arguments that lie on different devices. JAX moves only arrays that nobody placed."""
    names = tuple(inspect.signature(fn).parameters)

    @functools.wraps(fn)
    def call(*args, **kwargs):
        if _may_lie_apart(args, kwargs):
            require_together({**dict(zip(names, args, strict=False)), **kwargs})
        return fn(*args, **kwargs)

    return cast(Fn, call)


def _may_lie_apart(args, kwargs) -> bool:
    """Whether there is more than one place among the arrays that are bound to one."""
    places = set()
    for leaf in jax.tree.leaves((args, kwargs)):
        if isinstance(leaf, TorchTensor):
            places.add(leaf.device)
        elif isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.committed:
            places.add(leaf.sharding)
    return len(places) > 1


def require_together(arguments: Mapping[str, Any]) -> None:
    """Requires that the arrays of the arguments, as far as they are placed, lie on one device."""
    found: dict[type, tuple[str, set]] = {}  # of each framework the first
    for name, value in arguments.items():
        for leaf in jax.tree.leaves(value):
            if devices := _placed(leaf):
                first, expected = found.setdefault(type(leaf), (name, devices))
                if devices != expected:
                    raise InvalidInputError(
                        f"{name} must lie where {first} lies, on {_listed(expected)}, got "
                        f"{_listed(devices)}: jax.device_put moves JAX's arrays, .to torch's "
                        "tensors"
                    )


def require_no_explicit_axes(**arguments) -> None:
    """Refuses arrays sharded over explicit axes: JAX does not infer how attention would be."""
    for name, value in arguments.items():
        for array in jax.tree.leaves(value):
            if isinstance(array, jax.Array) and any(jax.typeof(array).sharding.spec):
                axes = [axis for axis in jax.typeof(array).sharding.spec if axis is not None]
                raise UnsupportedError(
                    f"{name} is sharded over {axes}, explicit axes of its mesh: call this inside "
                    "jax.shard_map, where each device has its own heads, as the page on several "
                    "devices (docs/parallel.md) shows"
                )


def _placed(leaf) -> set | None:
    """The devices that an array is bound to; None if JAX may move it, and for other values."""
    if is_torch(leaf):
        return {leaf.device}
    bound = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.committed
    return leaf.sharding.device_set if bound else None


def _listed(devices) -> str:
    return ", ".join(sorted(map(str, devices)))


def device_of(array) -> str:
    """The kind of device an array lies on; of a traced array, the kind of the default device."""
    if isinstance(array, TorchTensor):
        return array.device.type
    if isinstance(array, Tracer):
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
    if isinstance(array, TorchTensor):
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

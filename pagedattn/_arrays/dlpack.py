"""Arrays of other frameworks as JAX arrays over the same memory, for public functions."""

import contextlib
import dataclasses
import functools
import inspect
import operator
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..errors import InvalidInputError
from .checks import of_list
from .inspect import dtype_name, is_floating, is_integer
from .memory import require_memory

CURE = (
    "give it in contiguous, aligned memory, or make a copy by "
    "pagedattn_interop.to_jax(x, copy=True)"
)


def shared(name: str, array) -> jax.Array:
    """A DLPack array as a jax.Array over the same memory: never a copy.

    Raises:
      InvalidInputError: JAX cannot hold the dtype, or not read the memory as it lies; or there is
        no memory.
    """
    require_as_it_lies(name, array)
    held = held_dtype(name, array)
    if held.name != dtype_name(array.dtype):
        raise InvalidInputError(
            f"{name} is {array.dtype}, of which JAX keeps {held}: convert it first, let "
            "pagedattn_interop.to_jax(x, copy=True) do so, or set jax_enable_x64"
        )
    try:
        with _device_of(array):
            return jax.dlpack.from_dlpack(array, copy=False)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidInputError(
            f"JAX cannot share the memory of {name} ({reason}); {CURE}"
        ) from error


def held_dtype(name: str, array):
    """The dtype that JAX gives such an array: 64 bits become 32 unless jax_enable_x64 is set."""
    try:
        return jax.dtypes.canonicalize_dtype(dtype_name(array.dtype))
    except TypeError as error:
        raise InvalidInputError(f"{name} is {array.dtype}, which JAX does not have") from error


def _device_of(array):
    """A context that makes a CUDA tensor's device current: torch exports from no other."""
    if not getattr(array, "is_cuda", False):
        return contextlib.nullcontext()
    return sys.modules["torch"].cuda.device(array.device)  # loaded, since there is a tensor


def require_as_it_lies(name: str, array) -> None:
    """Refuses what others would read wrongly without a word: no memory, and lazy negations."""
    require_memory(name, array)
    if getattr(array, "is_neg", bool)():
        raise InvalidInputError(f"{name} is negated lazily: call .resolve_neg() first")


Fn = TypeVar("Fn", bound=Callable)
HOST = 1  # DLPack's device type of the CPU


def takes_any_array(fn: Fn) -> Fn:
    """Lets a function on JAX arrays take torch tensors and other DLPack arrays, without a copy.

    Lists of integers (slots, blocks, starts) are taken too.

    A call that shares memory returns only when its results are ready. JAX computes in the
    background, and the owner of the memory, who may write to it next, cannot know of that.
    """
    names = tuple(inspect.signature(fn).parameters)

    @functools.wraps(fn)
    def call(*args, **kwargs):
        for value in (*args, *kwargs.values()):
            if not _is_taken_as_it_is(type(value)) and not (
                _is_record(type(value))
                and all(map(_is_taken_as_it_is, map(type, jax.tree.leaves(value))))
            ):
                break
        else:
            return fn(*args, **kwargs)
        taken = [*map(argument, names, args), *args[len(names) :]]
        named = {name: argument(name, value) for name, value in kwargs.items()}
        results = fn(*taken, **named)
        if not _same((*taken, *named.values()), (*args, *kwargs.values())):
            _wait_for(results)
        return results

    return cast(Fn, call)


# Asked of types, once each: an eager call asks often.
_is_record = functools.cache(dataclasses.is_dataclass)


@functools.cache
def _is_taken_as_it_is(kind: type) -> bool:
    """Whether `argument` gives back all values of a type unchanged: no lists, no records."""
    if issubclass(kind, jax.Array | Tracer):
        return True
    return not (
        kind in (list, tuple)
        or issubclass(kind, np.ndarray)
        or hasattr(kind, "__dlpack_device__")
        or dataclasses.is_dataclass(kind)
    )


def argument(name: str, value: Any):
    """`as_jax`, and integers in a list as a NumPy array."""
    array = of_list(name, value)
    return array if array is not value and is_integer(array.dtype) else as_jax(name, value)


def as_jax(name: str, value: Any):
    """A foreign array, or a dataclass of arrays, over the same memory; other values unchanged.

    Integers on the host (tables, lengths, slots) become NumPy arrays, which may have any strides
    and 64 bits. Other NumPy arrays become JAX's by JAX's own rules, which may copy.
    """
    if isinstance(value, Tracer):  # first, since a traced array is the slowest to ask for anything
        return value
    if isinstance(value, np.ndarray):
        return _of_numpy(value)
    if isinstance(value, tuple) and type(value) is tuple:  # of a record's arrays
        taken = tuple(as_jax(f"{name}[{i}]", item) for i, item in enumerate(value))
        return value if _same(taken, value) else taken
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _record(name, value)
    foreign = hasattr(value, "__dlpack_device__") and hasattr(value, "dtype")
    return _of_others(name, value) if foreign and not isinstance(value, jax.Array) else value


def _of_numpy(array):
    if isinstance(array, np.ma.MaskedArray):
        return array  # refused later, by the check that knows the argument
    if not array.dtype.isnative:  # JAX takes no other byte order than the machine's
        array = array.astype(array.dtype.newbyteorder("="))
    return jnp.asarray(array) if is_floating(array.dtype) or _is_plane(array) else array


def _is_plane(array) -> bool:
    """Whether an array of integers is a plane of a quantised cache, and no table."""
    return dtype_name(array.dtype) in ("int8", "uint8") and len(array.shape) == 4


def _record(name, record):
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    taken = {field: as_jax(f"{name}.{field}", value) for field, value in fields.items()}
    same = _same(taken.values(), fields.values())
    return record if same else dataclasses.replace(record, **taken)


def _of_others(name, array):
    if not _host_integers(name, array):
        return shared(name, array)
    require_as_it_lies(name, array)
    try:
        return np.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidInputError(f"NumPy cannot share the memory of {name}: {error}") from error


def _host_integers(name, array):
    integers = dtype_name(array.dtype).startswith(("int", "uint"))
    try:
        return integers and not _is_plane(array) and array.__dlpack_device__()[0] == HOST
    except Exception as error:  # frameworks have errors of their own for tensors without memory
        raise InvalidInputError(f"{name} cannot be shared by DLPack: {error}") from error


def _same(new, old):
    return all(map(operator.is_, new, old))


def _wait_for(results):
    for result in jax.tree.leaves(results):
        if isinstance(result, jax.Array) and not isinstance(result, Tracer):
            result.block_until_ready()

"""Arrays crossing between JAX and torch through DLPack."""

import functools
from typing import Any, overload

import jax
import torch
from jax.core import Tracer

from pagedattn import InvalidInputError
from pagedattn._arrays.checks import flag
from pagedattn._arrays.dlpack import held_dtype, shared
from pagedattn._arrays.inspect import shown
from pagedattn._arrays.memory import require_memory
from pagedattn_torch.arrays import on_device_of


@overload
def to_torch(x: jax.Array, *, copy: bool = ...) -> torch.Tensor: ...
@overload
def to_torch(x: Any, *, copy: bool = ...) -> Any: ...
def to_torch(x: Any, *, copy: bool = False) -> Any:
    """JAX arrays as torch tensors over the same memory: an array, or a pytree of arrays.

    Writing to the tensor changes the array, which JAX takes for immutable: do so only if nothing
    else uses the array. On a GPU, keep the array until torch's kernels are done with the tensor:
    JAX does not wait for them when it frees memory.

    Args:
      copy: give each tensor memory of its own.

    Raises:
      InvalidInputError: an array is traced (use `torch_call`), or is on several devices.

    >>> to_torch(jax.numpy.arange(3))
    tensor([0, 1, 2], dtype=torch.int32)
    """
    flag("copy", copy)
    return jax.tree.map(functools.partial(_array_to_torch, copy=copy), x)


@overload
def to_jax(x: torch.Tensor, *, copy: bool = ...) -> jax.Array: ...
@overload
def to_jax(x: Any, *, copy: bool = ...) -> Any: ...
def to_jax(x: Any, *, copy: bool = False) -> Any:
    """Torch tensors as JAX arrays over the same memory: a tensor, or a pytree of tensors.

    While the array lives, leave the tensor unchanged: JAX takes its arrays for immutable.

    A transposed tensor is shared too: JAX knows axes in any order in memory, but no gaps.

    Args:
      copy: make a copy, in a dtype that JAX holds: without 64-bit mode (`jax_enable_x64`) float64
        is rounded to float32, and int64 becomes int32.

    Raises:
      InvalidInputError: JAX cannot share the memory (gaps, alignment, 64 bits) and `copy` is
        False; or an integer does not fit what JAX holds.

    >>> to_jax(torch.arange(3.0)).tolist()
    [0.0, 1.0, 2.0]
    """
    flag("copy", copy)
    return jax.tree.map(functools.partial(_tensor_to_jax, copy=copy), x)


def _array_to_torch(array, *, copy):
    if isinstance(array, Tracer):
        raise InvalidInputError(
            "to_torch expects a concrete array, got a traced one; inside jax.jit, call torch "
            "through pagedattn_interop.torch_call"
        )
    if not isinstance(array, jax.Array) or len(array.sharding.device_set) != 1:
        raise InvalidInputError(
            f"to_torch expects jax.Arrays on one device, got {shown(array)}; torch.as_tensor takes "
            "NumPy's arrays and lists"
        )
    tensor = _shared_tensor(array)
    if not copy:
        return tensor
    with on_device_of(tensor):
        tensor = tensor.clone()
    if tensor.is_cuda:
        # JAX does not wait for torch's kernels, so it could free the array before it is copied.
        torch.cuda.current_stream(tensor.device).synchronize()
    return tensor


def _shared_tensor(array):
    try:
        # The export has torch's stream wait for the value, or on a CPU, without one, the caller.
        return torch.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidInputError(f"torch cannot share this array's memory: {error}") from error


def _tensor_to_jax(tensor, *, copy):
    if not isinstance(tensor, torch.Tensor):
        raise InvalidInputError(f"to_jax expects torch tensors, got {type(tensor).__name__}")
    require_memory("the tensor", tensor)
    tensor = tensor.detach()
    with on_device_of(tensor):
        return shared("the tensor", _copied(tensor) if copy else tensor)


def _copied(tensor):
    dtype = getattr(torch, held_dtype("the tensor", tensor).name)
    copied = tensor.resolve_conj().resolve_neg().to(dtype, copy=True)
    integers = not (tensor.is_floating_point() or tensor.is_complex())
    # Compared in int64, since torch cannot compare all unsigned integers.
    if integers and (copied.to(torch.int64) != tensor.to(torch.int64)).any():
        raise InvalidInputError(
            f"to_jax would lose values of this {tensor.dtype} tensor: JAX keeps {dtype} of it "
            "unless jax_enable_x64 is set"
        )
    return copied

"""Arrays crossing between JAX and torch through DLPack."""

import functools

import jax
import torch
from jaxtyping import PyTree

from pagedattn import InvalidInputError
from pagedattn.checks import is_traced


def to_torch(x: PyTree, *, copy: bool = False) -> PyTree:
    """JAX arrays as torch tensors over the same memory: an array, or a pytree of arrays.

    The tensor sees what the array sees, so don't write into it unless the array is yours to
    change: JAX takes its arrays for immutable. On a GPU, keep the array until torch's kernels are
    done with the tensor: JAX does not wait for them when it frees memory.

    Args:
      copy: give each tensor memory of its own.

    Raises:
      InvalidInputError: traced (use `torch_call`), or spread over several devices.

    >>> to_torch(jax.numpy.arange(3))
    tensor([0, 1, 2], dtype=torch.int32)
    """
    return jax.tree.map(functools.partial(_array_to_torch, copy=copy), x)


def to_jax(x: PyTree, *, copy: bool = False) -> PyTree:
    """Torch tensors as JAX arrays over the same memory: a tensor, or a pytree of tensors.

    While the array lives, leave the tensor unchanged: JAX takes its arrays for immutable.

    Args:
      copy: allow a copy where the memory cannot be shared (strides, alignment), and make one.

    Raises:
      InvalidInputError: JAX would have to copy the tensor, and `copy` is False.

    >>> to_jax(torch.arange(3.0)).tolist()
    [0.0, 1.0, 2.0]
    """
    return jax.tree.map(functools.partial(_tensor_to_jax, copy=copy), x)


def _array_to_torch(array, *, copy):
    if is_traced(array):
        raise InvalidInputError(
            "to_torch expects a concrete array, got a traced one; inside jax.jit, call torch "
            "through pagedattn_interop.torch_call"
        )
    if not isinstance(array, jax.Array) or len(array.devices()) != 1:
        raise InvalidInputError(f"to_torch expects jax.Arrays on one device, got {array!r}")
    # On the CPU the protocol has no stream to order on: wait for the value.
    tensor = torch.from_dlpack(jax.block_until_ready(array))
    if not copy:
        return tensor
    tensor = tensor.clone()
    if tensor.is_cuda:
        # The array may be gone before the copy is made, and JAX does not wait for torch's kernels.
        torch.cuda.current_stream(tensor.device).synchronize()
    return tensor


def _tensor_to_jax(tensor, *, copy):
    if not isinstance(tensor, torch.Tensor):
        raise InvalidInputError(f"to_jax expects torch tensors, got {type(tensor).__name__}")
    tensor = tensor.detach()
    if copy:
        return jax.numpy.from_dlpack(tensor.clone(memory_format=torch.contiguous_format))
    if not tensor.is_contiguous():
        raise InvalidInputError(
            f"to_jax expects a contiguous tensor, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}; call .contiguous() first, or pass copy=True"
        )
    return _shared(tensor)


def _shared(tensor):
    try:
        array = jax.dlpack.from_dlpack(tensor, copy=False)
    except (ValueError, RuntimeError) as error:
        raise InvalidInputError(
            f"JAX cannot share this tensor's memory ({error}); pass copy=True"
        ) from error
    return array

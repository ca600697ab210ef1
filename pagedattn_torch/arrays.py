"""Arrays of any framework as torch tensors that the kernels can take, and checks of tensors."""

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np
import torch
from jax.core import Tracer
from torch import Tensor
from torch.autograd import forward_ad

from pagedattn import BatchMetadata, InvalidInputError, KVCache, UnsupportedError
from pagedattn._arrays.dlpack import HOST
from pagedattn._arrays.memory import require_dense
from pagedattn.batch.draft_tree import DraftTree
from pagedattn.batch.metadata import Sequences
from pagedattn.batch.validate import ARRAYS


def tensor(name: str, array, device=None) -> Tensor:
    """The array as a tensor: a tensor as it is, any other array by DLPack.

    It stays on its device unless another one is given. NumPy arrays are copied where torch cannot
    share them: negative strides, read-only memory, foreign byte order.

    Raises:
      InvalidInputError: a list, an array of objects, or anything else that torch cannot hold; a
        tensor that kernels would read wrongly, or whose memory is gone.
    """
    converted = array if isinstance(array, Tensor) else _exchanged(name, array)
    require_dense(name, converted)
    if converted.is_neg():
        raise _negated(name)
    if converted.is_meta and device is not None and torch.device(device).type != "meta":
        raise InvalidInputError(f"{name} is a meta tensor, which has no values")
    return converted.to(device) if device is not None else converted


def int32(array: Tensor) -> Tensor:
    """Integers as int32, -1 in place of what does not fit; int32 and non-integers as they are."""
    if array.dtype is torch.int32 or not _is_integer(array):
        return array
    wide = array.to(torch.int64)  # torch cannot compare all unsigned integers
    wide = wide if array.dtype.is_signed else wide.clamp(min=-1)
    narrow = wide.to(torch.int32)
    return torch.where(narrow == wide, narrow, -1)


def signed(array: Tensor) -> Tensor:
    """int32 and int64 as they are; other integers as int32, since their differences could wrap."""
    return array if array.dtype is torch.int64 else int32(array)


def batch_on(batch: BatchMetadata, device) -> BatchMetadata:
    """The batch with its arrays as int32 tensors on a device, or each where it lies (None).

    Nothing is read of tensors that are so already, the usual case: they are not asked for memory.
    """
    changed = {}
    for name in ARRAYS:
        array = getattr(batch, name)
        as_it_is = isinstance(array, Tensor) and array.dtype is torch.int32 and not array.is_neg()
        if not as_it_is or (device is not None and array.device != torch.device(device)):
            changed[name] = int32(tensor(name, _outliving(array), device))
    if batch.tree is not None:
        changed["tree"] = tree_on(batch.tree, device)
    return dataclasses.replace(batch, **changed) if changed else batch


def tree_on(tree: DraftTree, device) -> DraftTree[Tensor]:
    """The tree of a batch, as `batch_on` has its arrays."""
    return DraftTree(
        **{
            name: int32(tensor(f"tree.{name}", _outliving(array), device))
            for name, array in vars(tree).items()
        }
    )


def batch_arrays(batch: Sequences) -> dict[str, Any]:
    """What backends read of a batch, by the names that errors call them."""
    arrays = dict(vars(batch))
    if (tree := arrays.pop("tree")) is not None:
        arrays |= {f"tree.{name}": array for name, array in vars(tree).items()}
    return arrays


def _outliving(array):
    """A copy of a JAX array on an accelerator, any other as it is.

    JAX hands memory out again as soon as nothing refers to it, also while kernels that torch has
    enqueued are still to read it, on a stream that JAX does not know.
    """
    if not isinstance(array, jax.Array) or isinstance(array, Tracer) or _is_on_host(array):
        return array
    return torch.tensor(np.asarray(array), device=torch.from_dlpack(array).device)


def nondecreasing(starts: Tensor) -> Tensor:
    """Starts that never fall: zeros behind the last sequence become its end. Others as they are."""
    return starts.cummax(0).values if starts.ndim and _is_integer(starts) else starts


def with_dense_rows(rows: Tensor) -> Tensor:
    """A tensor with stride 1 along its last axis, as kernels load it: the same one, or a copy."""
    return rows if rows.stride()[-1:] == (1,) else rows.contiguous()


def require_tensors(**arrays) -> None:
    for name, array in arrays.items():
        if not isinstance(array, Tensor):
            raise InvalidInputError(
                f"{name} must be a torch tensor, got {type(array).__name__}; "
                "pagedattn_interop.to_torch converts JAX arrays without a copy, torch.as_tensor "
                "what NumPy holds"
            )
        require_dense(name, array)
        if array.is_neg():
            raise _negated(name)


def _negated(name: str) -> InvalidInputError:
    """Of what a kernel that is given an address would read with the wrong sign."""
    return InvalidInputError(f"{name} is negated lazily: call .resolve_neg() first")


def require_cache(cache: KVCache) -> None:
    """Requires a cache of tensors."""
    require_tensors(**arrays_of(cache))


def arrays_of(cache: KVCache) -> dict[str, Any]:
    """What a cache has for arrays, by the names that errors call them; requires a cache."""
    if not isinstance(cache, KVCache):
        raise InvalidInputError(
            f"cache must be a KVCache of torch tensors, got {type(cache).__name__}; "
            "split_kv_cache makes one of a layer's kv_cache"
        )
    arrays: dict[str, Any] = {"the cache's key": cache.key}
    for name, called in _IN_CACHES.items():
        if (array := getattr(cache, name)) is not None:
            arrays[called] = array
    return arrays


_IN_CACHES = {
    field.name: f"the cache's {field.name}"
    for field in dataclasses.fields(KVCache)
    if field.name != "key" and not field.metadata.get("static")
}


def require_writable(**arrays: Tensor) -> None:
    """Requires tensors that torch writes to in place; asked of all before the first is written."""
    for name, array in arrays.items():
        if array.is_inference() and not torch.is_inference_mode_enabled():
            raise InvalidInputError(
                f"{name} is an inference tensor, which torch writes to only inside "
                "torch.inference_mode(): write there, or clone() it outside"
            )
        strides = array.stride()
        if 0 in strides and max(n for n, s in zip(array.shape, strides, strict=True) if not s) > 1:
            raise InvalidInputError(
                f"{name} has several elements in one place, strides {strides} of shape "
                f"{list(array.shape)}: clone() it"
            )


def require_beside(of: str, place: Tensor, /, **tensors: Tensor | None) -> None:
    """Requires tensors on the device of `place`, which is a tensor of `of`."""
    device = place.device
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise InvalidInputError(
                f"{name} must lie on the {of}'s {device}, got {tensor.device}; its .to moves it"
            )


def bits(tensor: Tensor) -> Tensor:
    """The same memory as bytes, if its elements are bytes: torch copies few kinds of float8."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def require_no_grad(*tensors: Tensor) -> None:
    """Refuses tensors of which a gradient is recorded, backward or forward: it would be lost."""
    backward = torch.is_grad_enabled()
    for tensor in tensors:
        recorded = backward and tensor.requires_grad
        if recorded or forward_ad.unpack_dual(tensor).tangent is not None:
            raise UnsupportedError(
                "gradients do not flow through torch tensors: call pagedattn from JAX for them, or "
                "this under torch.no_grad()"
            )


def on_device_of(tensor: Tensor):
    """A context that makes the tensor's device current: Triton and xFormers launch on that one."""
    module = {"cuda": torch.cuda, "xpu": torch.xpu}.get(tensor.device.type)
    return module.device(tensor.device) if module else contextlib.nullcontext()


def without_autocast(device: torch.device):
    """A context in which products are computed in the dtypes of their tensors, and no smaller."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()


def _exchanged(name, array) -> Tensor:
    if not hasattr(array, "__dlpack__") or isinstance(array, np.ma.MaskedArray):
        raise InvalidInputError(
            f"{name} must be an array of torch, JAX or NumPy, got {type(array).__name__}; "
            "torch.tensor makes one of a list"
        )
    try:
        return torch.from_dlpack(_exportable(array))
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"{name} must be an array that torch can share, got {type(array).__name__}: {error}"
        ) from error


def _exportable(array):
    """The array, or, if it lies in host memory, a NumPy array that torch can share.

    Torch ends the process at negative strides; DLPack exports neither read-only memory nor foreign
    byte order. So NumPy copies such arrays. JAX's arrays are never like that.
    """
    if isinstance(array, jax.Array) or not _is_on_host(array):
        return array
    array = array if isinstance(array, np.ndarray) else np.from_dlpack(array)
    return np.require(array, array.dtype.newbyteorder("="), ("C", "W", "A"))


def _is_on_host(array) -> bool:
    return array.__dlpack_device__()[0] == HOST


def _is_integer(array: Tensor) -> bool:
    dtype = array.dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)

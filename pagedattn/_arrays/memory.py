"""The memory of torch tensors: whether it is there, asked before anything reads it.

The storage of a tensor may be freed while the tensor lives (`untyped_storage().resize_(0)`, as FSDP
does), or be shorter than the tensor. Fake and functional tensors, meta tensors, and subclasses that
wrap other tensors have a shape, but no memory. Torch asks nothing of this when it gives an address,
values or a DLPack capsule, and whoever reads there ends the process.
"""

import operator
import sys
from typing import Any

from ..errors import InvalidInputError
from .typing import TorchTensor

FAR = 1 << 40  # bytes: no view begins so far behind its storage. Few addresses need a second look


def require_dense(name: str, tensor: Any) -> int:
    """Requires a torch tensor of shape and strides, whose storage holds all of its elements.

    Tensors without memory pass: torch says of their storage what it would hold.

    Returns:
      where the first element lies; 0 for nowhere.
    """
    strided = sys.modules["torch"].strided  # loaded, since there is a tensor
    if tensor.layout is not strided or tensor.is_quantized or tensor.is_nested:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise InvalidInputError(
            f"{name} must be a dense tensor (torch.strided), got {tensor.dtype} {kind}"
        )
    try:
        held = tensor.untyped_storage().nbytes()
    except NotImplementedError:  # inside torch.vmap and torch.func.grad they have no storage
        return 0
    plain = tensor.is_contiguous() and not tensor.storage_offset()
    needed = tensor.nbytes if plain else _bytes_needed(tensor)
    if isinstance(held, int) and held < needed:  # it may be a symbol, while torch traces
        raise InvalidInputError(
            f"{name} needs {needed} bytes of memory, its storage has {held}: it was freed or cut "
            "by untyped_storage().resize_; give a tensor whose memory is there"
        )
    try:
        place = tensor.data_ptr()
    except RuntimeError:  # as fake tensors while torch.compile traces
        return 0
    return place if place >= FAR else _unless_offset(tensor, place)


def address(name: str, tensor: Any) -> int:
    """Where the first element of a torch tensor lies, for those who read memory by themselves.

    Raises:
      InvalidInputError: nowhere; tensors without elements are nowhere, too, and lie at 0.
    """
    if is_fake(tensor):
        raise InvalidInputError(
            f"{name} must have memory, but this {type(tensor).__name__} has none: it is fake, "
            "functional, on the meta device, wraps another tensor, or stands for one inside a "
            "transform of torch.func; give the tensor that holds the values"
        )
    return tensor.data_ptr() if tensor.numel() else 0


def require_memory(name: str, value: Any) -> None:
    """Requires of torch tensors, on whatever device, that their values can be read where they lie.

    Of one, and of those in a list, which are read one by one; anything else passes.
    """
    if isinstance(value, TorchTensor):
        if not require_dense(name, value):
            address(name, value)
    elif type(value) in (list, tuple) and any(map(_may_hold, {*map(type, value)})):
        for item in value:
            require_memory(name, item)


def require_alike(**tensors: Any) -> None:
    """Requires torch tensors that all have memory, or all have none."""
    there, fake = [], []
    for name, tensor in tensors.items():
        if tensor.numel():
            (fake if is_fake(tensor) else there).append(name)
    if there and fake:
        names = [name for name in tensors if name in (*there, *fake)]
        raise InvalidInputError(
            f"{', '.join(names)} must all have memory, or all be fake, functional, wrapping or on "
            f"the meta device: there is none for {', '.join(fake)} only"
        )


def is_fake(tensor: Any) -> bool:
    """Whether a torch tensor has elements, but no memory."""
    try:
        place = tensor.data_ptr()
    except RuntimeError:  # as fake tensors while torch.compile traces, and those of torch.vmap
        return tensor.numel() > 0
    return place < FAR and not _unless_offset(tensor, place) and tensor.numel() > 0


def _unless_offset(tensor: Any, place: int) -> int:
    """The address of a tensor; 0 if it is but the offset, as of views without memory."""
    return 0 if place == tensor.storage_offset() * tensor.element_size() else place


def _may_hold(kind: type) -> bool:
    return kind in (list, tuple) or issubclass(kind, TorchTensor)


def bytes_spanned(tensor: Any) -> int:
    """From the first byte of a tensor's first element to the last one of its last element."""
    if tensor.is_contiguous() or not tensor.nbytes:
        return tensor.nbytes
    strides = tensor.stride()
    gaps = sum(map(operator.mul, tensor.shape, strides)) - sum(strides)
    return (1 + gaps) * tensor.element_size()


def _bytes_needed(tensor) -> int:
    """From the start of the storage to the end of the tensor's last element."""
    spanned, offset = bytes_spanned(tensor), tensor.storage_offset()
    return spanned + offset * tensor.element_size() if offset and spanned else spanned

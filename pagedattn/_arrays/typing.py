"""The kind of an array: JAX's, torch's or another's, for type checkers and at run time."""

from abc import ABCMeta
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    class AnArray(Protocol):
        """What arrays of all frameworks have."""

        @property
        def shape(self) -> tuple[int, ...]: ...
        @property
        def dtype(self) -> Any: ...
        def __getitem__(self, key: Any, /) -> Any: ...

    ArrayT = TypeVar("ArrayT", bound=AnArray, default=Any)
else:  # typing has defaults from Python 3.13 on
    from typing import TypeVar

    ArrayT = TypeVar("ArrayT")


class TorchTensor(metaclass=ABCMeta):
    """Torch's tensors, which are its subclasses without torch being imported.

    Python asks `__subclasshook__` once for each class.
    """

    device: Any
    dtype: Any
    ndim: Any
    stride: Any
    detach: Any

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        return hasattr(kind, "new_tensor")


def is_torch(value: object) -> bool:
    """Whether a value is a torch tensor.

    >>> import numpy as np
    >>> is_torch(np.zeros(3))
    False
    """
    return isinstance(value, TorchTensor)

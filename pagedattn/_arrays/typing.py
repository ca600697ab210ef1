"""The kind of array that a record holds, for type checkers: JAX's, torch's or another's."""

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


def is_torch(value: object) -> bool:
    """Whether a value is a torch tensor, or a class of them, without importing torch.

    >>> import numpy as np
    >>> is_torch(np.zeros(3))
    False
    """
    return hasattr(value, "new_tensor")

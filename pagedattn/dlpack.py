"""Arrays of other frameworks as JAX arrays over the same memory."""

import contextlib
import sys

import jax

from .errors import InvalidInputError
from .facts import dtype_name
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

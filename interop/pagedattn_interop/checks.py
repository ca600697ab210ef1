"""Checks of what `torch_call` is given: what is wrong is said where it is called, not by XLA."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedattn import InvalidInputError
from pagedattn._arrays.checks import an_array, whole
from pagedattn._arrays.inspect import dtype_of, is_floating, is_integer, shown

NO_COUNT = -1


def results(out) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shape and dtype of each result, of one array or a sequence; torch's dtypes as JAX's."""
    return tuple(map(_result, out if isinstance(out, Sequence) else (out,)))


def _result(out) -> jax.ShapeDtypeStruct:
    shape, dtype = getattr(out, "shape", None), dtype_of(getattr(out, "dtype", None))
    sizes = [_count(size) for size in shape] if isinstance(shape, tuple) else [NO_COUNT]
    if not (NO_COUNT not in sizes and _crosses(dtype)):
        raise InvalidInputError(
            "out must be a jax.ShapeDtypeStruct for each result, or a sequence of them, of "
            f"integers of eight bits or more, floating or bool, got {shown(out)}"
        )
    return jax.ShapeDtypeStruct(tuple(sizes), dtype)


def aliases(given, num_outs: int) -> dict[int, int]:
    """`{argument: result}` as Python's integers, no result twice."""
    text = (
        f"aliases must map the numbers of arguments to those of the {num_outs} results, each once, "
        f"got {shown(given)}"
    )
    if given is not None and not isinstance(given, Mapping):
        raise InvalidInputError(text)
    pairs = {_count(argument): _count(result) for argument, result in (given or {}).items()}
    written = {*pairs.values()}
    if not (NO_COUNT not in pairs and written <= {*range(num_outs)}):
        raise InvalidInputError(text)
    if len(written) != len(pairs):
        raise InvalidInputError(text)
    return pairs


def arguments(arrays, outs, aliases: Mapping[int, int]) -> None:
    """Requires arrays of JAX's, and that those updated in place are like their results."""
    types = [_type(number, array) for number, array in enumerate(arrays)]
    for argument, result in aliases.items():
        if not argument < len(types):
            raise InvalidInputError(f"aliases name argument {argument}, the call has {len(types)}")
        got, expected = types[argument], outs[result]
        if not (got.shape == expected.shape and got.dtype == expected.dtype):
            raise InvalidInputError(
                f"argument {argument} becomes result {result}, {expected}, but is {got}"
            )


def _type(number, array) -> Any:
    try:
        held = jnp.asarray(array) if isinstance(array, int | float) else array
        found = jax.typeof(held) if isinstance(held, jax.Array | np.ndarray | np.generic) else None
    except (OverflowError, TypeError, ValueError):  # JAX cannot hold it
        found = None
    if not (found is not None and _crosses(found.dtype)):
        raise InvalidInputError(
            f"argument {number} must be an array of JAX or NumPy, of integers of eight bits or "
            f"more, floating or bool, got {shown(array)}; to_jax shares a tensor's memory"
        )
    if held is array:
        an_array(f"argument {number}", array)
    return found


def _crosses(dtype) -> bool:
    return is_floating(dtype) or is_integer(dtype) or dtype == np.bool_


def _count(number) -> int:
    """The number as an int, if it is one of 0, 1, 2, ..."""
    number = whole(number)
    return NO_COUNT if number is None or number < 0 else number

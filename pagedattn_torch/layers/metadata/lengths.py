"""The lengths of a batch as lists, tensors, starts and bounds, each derived from another.

Values on a GPU are never read, since that would wait for it. Lists of such lengths stay None, and
looser bounds take the place of maxima.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagedattn import InvalidInputError
from pagedattn._arrays.checks import int_array
from pagedattn._arrays.inspect import known
from pagedattn.batch import validate as validate_batch

from ...arrays import nondecreasing


def start_locs(lengths: Tensor) -> Tensor:
    """Where each span starts and the last one ends: int32 `[n + 1]`.

    >>> start_locs(torch.tensor([3, 1]))
    tensor([0, 3, 4], dtype=torch.int32)
    """
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def nondecreasing_starts(starts: Tensor) -> Tensor:
    """Starts of which zeros behind the last sequence become its end.

    The same tensor where there are none, and where values are not read: graphs hold on to it.

    >>> nondecreasing_starts(torch.tensor([0, 3, 4, 0]))
    tensor([0, 3, 4, 4])
    """
    values = known(starts)
    falls = values is not None and values.ndim == 1 and (values[1:] < values[:-1]).any()
    return nondecreasing(starts) if falls else starts


def both_forms(name: str, listed: Sequence[int] | None, tensor: Tensor | None, device):
    """Lengths as a list and as an int32 tensor, from either form; the list is None if unknown.

    Raises:
      InvalidInputError: both are given and differ, or they are not integers of at least 0.
    """
    listed = None if listed is None else validate_batch.lengths(name, listed).tolist()
    values = _checked(f"{name}_tensor", tensor)
    if listed is None:
        return None if values is None else values.tolist(), tensor
    if tensor is None:
        return listed, torch.tensor(listed, dtype=torch.int32, device=device)
    if values is not None and values.tolist() != listed:
        raise InvalidInputError(
            f"{name} and {name}_tensor must hold the same lengths, got {listed} and {values}"
        )
    return listed, tensor


def _checked(name, tensor):
    """The lengths in a tensor, checked; None if unknown."""
    if tensor is None:
        return None
    int_array(name, tensor, 1)
    values = known(tensor)
    if values is not None and (values < 0).any():
        raise InvalidInputError(
            f"{name} must not be negative, got {None if values is None else values.tolist()}"
        )
    return values


def agreed(name: str, given: Tensor | None, derived: Tensor) -> Tensor:
    """The given tensor, or, without one, the derived.

    Raises:
      InvalidInputError: their shapes differ, or, if both are known, their values.
    """
    if given is None:
        return derived
    values, expected = known(given), known(derived)
    if not (
        tuple(given.shape) == tuple(derived.shape)
        and (values is None or expected is None or (values == expected).all())
    ):
        raise InvalidInputError(
            f"{name} must be {derived.tolist() if expected is not None else derived.shape}, as the "
            f"other lengths say, got {given.tolist() if values is not None else given.shape}"
        )
    return given


def bound(name: str, given: int | None, lengths, fallback: int | None = None) -> int | None:
    """An upper bound on lengths: the given one, else the longest, else (if unknown) the fallback.

    Raises:
      InvalidInputError: a length exceeds the given bound.
    """
    if lengths is None:
        return fallback if given is None else given
    longest = max(lengths, default=0)
    if given is not None and not given >= longest:
        raise InvalidInputError(
            f"{name} must be at least {longest}, the longest of {list(lengths)}, got {given}"
        )
    return longest if given is None else given


def span_lengths(starts: Tensor | None) -> list[int] | None:
    """The lengths of the spans between starts; None if unknown."""
    values = None if starts is None else known(starts)
    return None if values is None else (values[1:] - values[:-1]).tolist()


def on_host(name: str, values):
    """The lengths, which must be known here."""
    if values is None:
        raise InvalidInputError(
            f"this needs {name} on the host, but it lies on a GPU, and reading it would wait for "
            "that; give the metadata its lists of lengths, and starts on the CPU"
        )
    return values

"""Checks of the lists that `make_batch` takes, which are returned as NumPy arrays."""

import numpy as np

from .checks import MAX_SLOTS, count, integers, is_count, require, static
from .errors import InvalidInputError
from .facts import shown
from .ragged import cdiv


def lengths(name: str, values, like=None) -> np.ndarray:
    """A list of non-negative integers as int64; as long as `like`, if that is given."""
    array = integers(name, values, ndim=1)
    require(not (array < 0).any(), f"{name} must not be negative, got {array.tolist()}")
    require(
        array.max(initial=0) <= MAX_SLOTS and array.sum() <= MAX_SLOTS,
        f"{name} and their sum must fit int32, got {array.tolist()}",
    )
    if like is not None:
        require(
            len(array) == len(like),
            f"{name} must have one entry for each of the {len(like)} sequences, got {len(array)}",
        )
    return array


def block_size(size) -> int:
    return count("block_size", size)


def tables(block_tables, seq_lens, block_size) -> np.ndarray:
    """Block tables as a rectangle of int64, each row long enough for its sequence."""
    rows = [integers("each row of block_tables", row, ndim=1) for row in _rows(block_tables)]
    require(
        len(rows) == len(seq_lens),
        f"block_tables must have a row for each of the {len(seq_lens)} sequences, got {len(rows)}",
    )
    needed = cdiv(seq_lens, block_size)
    table = np.full((len(rows), max(map(len, rows), default=0)), -1, np.int64)
    for s, (row, least) in enumerate(zip(rows, needed, strict=True)):
        _check_row(s, row, least, seq_lens[s], block_size)
        table[s, : len(row)] = row
    return table


def _rows(block_tables):
    try:
        return list(block_tables)
    except Exception as error:
        raise InvalidInputError(
            f"block_tables must be a list of rows or an array, got {type(block_tables).__name__}"
        ) from error


def _check_row(s, row, count, seq_len, block_size):
    require(
        len(row) >= count,
        f"sequence {s} of length {seq_len} needs {count} blocks of {block_size}, but its row of "
        f"block_tables has {len(row)}; allocate blocks before making the batch",
    )
    used = row[:count]
    require(
        ((used >= 0) & ((used + 1) * block_size <= MAX_SLOTS)).all(),
        f"block ids must be at least 0, and slots must fit int32; sequence {s} uses "
        f"{used.tolist()} with block_size {block_size}",
    )


def padding(name: str, needed: int, given) -> int:
    """A padded length: `given`, which must be enough, or else `needed`."""
    if given is None:
        return needed
    static(name, given)
    require(
        is_count(given, 0) and given >= needed,
        f"{name} must be an integer of at least {needed}, which this batch needs, got "
        f"{shown(given)}",
    )
    return int(given)

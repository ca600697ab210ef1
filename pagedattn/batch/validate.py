"""Checks of a batch, and of the lists that one is made of.

Shapes and types are checked always, values where they are known on the host.
"""

import numpy as np
from jax.core import Tracer

from .._arrays.checks import (
    MAX_SLOTS,
    ids,
    int_array,
    integers,
    is_count,
    known_sizes,
    start_locs,
    static,
)
from .._arrays.inspect import known, shown
from .._arrays.int32 import nondecreasing
from .._arrays.namespace import cdiv, namespace
from ..cache.validate import is_static_count
from ..errors import InvalidInputError
from ..masks import key_range
from .draft_tree import DraftTree, num_words, own_indices
from .metadata import BatchMetadata

ARRAYS = ("block_tables", "seq_lens", "query_start_loc", "slot_mapping", "positions")


def a_batch(batch) -> None:
    if not isinstance(batch, BatchMetadata):
        raise InvalidInputError(
            f"batch must be a BatchMetadata, got {type(batch).__name__}; make_batch makes one"
        )
    if not isinstance(batch.tree, DraftTree | None):
        raise InvalidInputError(f"batch.tree must be a DraftTree, got {shown(batch.tree)}")


def shapes(batch) -> None:
    """Requires a batch whose arrays are of integers and fit together."""
    a_batch(batch)
    for name in ("block_size", "max_query_len"):
        size = getattr(batch, name)
        if not (is_static_count(size, int(name == "block_size")) and size < 2**31):
            raise InvalidInputError(
                f"batch.{name} must be a Python integer below 2**31, got {shown(size)}"
            )
    for name in ARRAYS:
        array = getattr(batch, name)
        int_array(name, array, 2 if name == "block_tables" else 1)
        if isinstance(array, Tracer):
            known_sizes(name, array)
    num_seqs, num_tokens = batch.num_seqs, batch.num_tokens
    if len(batch.block_tables) != num_seqs or len(batch.query_start_loc) != num_seqs + 1:
        raise InvalidInputError(
            f"with seq_lens of {num_seqs} sequences, block_tables must have as many rows and "
            f"query_start_loc one entry more, got {tuple(batch.block_tables.shape)} and "
            f"{tuple(batch.query_start_loc.shape)}"
        )
    if len(batch.slot_mapping) != num_tokens:
        raise InvalidInputError(
            f"slot_mapping must have the batch's {num_tokens} tokens, got {len(batch.slot_mapping)}"
        )
    if batch.tree is not None:
        _tree(batch.tree, num_tokens, batch.max_query_len)


def _tree(tree, num_tokens, max_query_len):
    rows = dict.fromkeys(("parents", "depths"), (num_tokens,))
    sizes = rows | {"ancestors": (num_tokens, num_words(max_query_len))}
    for name, size in sizes.items():
        array = getattr(tree, name)
        int_array(f"tree.{name}", array, len(size))
        if tuple(array.shape) != size:
            raise InvalidInputError(
                f"with {num_tokens} tokens and a max_query_len of {max_query_len}, tree.{name} "
                f"must be {list(size)}, got {list(array.shape)}; make_batch and next_batch make a "
                "tree of parents"
            )


def fits(batch, cache) -> None:
    """Requires a batch that was made for blocks of the cache's size."""
    shapes(batch)
    if batch.block_size != cache.block_size:
        raise InvalidInputError(
            f"the batch was made for blocks of {batch.block_size}, the cache has {cache.block_size}"
        )


def values(batch, num_blocks: int, window: int | None) -> None:
    """Requires starts, lengths and blocks in range, as far as they are known."""
    starts, seq_lens = known(batch.query_start_loc), known(batch.seq_lens)
    table = known(batch.block_tables)
    if starts is not None:
        start_locs("query_start_loc", starts, batch.num_tokens, batch.max_query_len)
    if seq_lens is None or table is None:
        return
    width = table.shape[1]
    needed = cdiv(seq_lens, batch.block_size)
    if not ((seq_lens >= 0) & (needed <= width)).all():
        raise InvalidInputError(
            f"seq_lens must be between 0 and what {width} blocks of {batch.block_size} hold, got "
            f"{seq_lens.tolist()}"
        )
    if window is not None and starts is None:
        return  # unknown positions: any entry may lie behind the window
    first = first_columns(batch.block_size, seq_lens, starts, window)
    used = table[(np.arange(width) >= first[:, None]) & (np.arange(width) < needed[:, None])]
    if (used == -1).any():
        raise InvalidInputError(
            "block_tables must name a block for all keys that the call may see, got -1: "
            "release_behind takes the widest window of its layers, after their attention"
        )
    ids("block_tables", used, num_blocks, "blocks")


def first_columns(block_size, seq_lens, starts, window):
    """The column of the first key that a sequence's queries see; no entry before it is followed.

    Of arrays of NumPy or JAX.
    """
    xp = namespace(seq_lens)
    if window is None:
        return xp.zeros_like(seq_lens)
    starts = np.maximum.accumulate(starts) if xp is np else nondecreasing(starts)
    query_lens = xp.diff(starts)
    context_lens = seq_lens - query_lens
    first, _ = key_range(context_lens, context_lens, seq_lens, False, window)
    return xp.where(query_lens > 0, first, seq_lens) // block_size


def lengths(name: str, values, like=None) -> np.ndarray:
    """A list of non-negative integers as int64; as long as `like`, if that is given."""
    array = integers(name, values, ndim=1)
    if (array < 0).any():
        raise InvalidInputError(f"{name} must not be negative, got {array.tolist()}")
    if not (array.max(initial=0) <= MAX_SLOTS and array.sum() <= MAX_SLOTS):
        raise InvalidInputError(f"{name} and their sum must fit int32, got {array.tolist()}")
    if like is not None and len(array) != len(like):
        raise InvalidInputError(
            f"{name} must have one entry for each of the {len(like)} sequences, got {len(array)}"
        )
    return array


def parents(values, query_lens) -> np.ndarray:
    """A parent for each new token, among those of its sequence that come before it, or -1."""
    array = integers("parents", values, ndim=1)
    if len(array) != query_lens.sum():
        raise InvalidInputError(
            f"parents must have one entry for each of the {query_lens.sum()} new tokens, got "
            f"{len(array)}"
        )
    require_parents(array, np.append(0, np.cumsum(query_lens)))
    return array.astype(np.int32)


def require_parents(parents, starts) -> None:
    """Requires known parents that come before their tokens."""
    own = own_indices(starts, len(parents))
    wrong = np.flatnonzero((own >= 0) & ~((parents >= -1) & (parents < own)))
    if len(wrong):
        token = wrong[0]
        raise InvalidInputError(
            "a parent must be the index, among its sequence's new tokens, of one before the token, "
            f"or -1, got {parents[token]} for the one of index {own[token]} (token {token})"
        )


def tables(block_tables, seq_lens, block_size) -> np.ndarray:
    """Block tables as a rectangle of int64, each row long enough for its sequence."""
    rows = [integers("each row of block_tables", row, ndim=1) for row in _rows(block_tables)]
    if len(rows) != len(seq_lens):
        raise InvalidInputError(
            f"block_tables must have a row for each of the {len(seq_lens)} sequences, got "
            f"{len(rows)}"
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
    if not len(row) >= count:
        raise InvalidInputError(
            f"sequence {s} of length {seq_len} needs {count} blocks of {block_size}, but its row "
            f"of block_tables has {len(row)}; allocate blocks before making the batch"
        )
    used = row[:count]
    if not ((used >= 0) & ((used + 1) * block_size <= MAX_SLOTS)).all():
        raise InvalidInputError(
            f"block ids must be at least 0, and slots must fit int32; sequence {s} uses "
            f"{used.tolist()} with block_size {block_size}"
        )


def padding(name: str, needed: int, given) -> int:
    """A padded length: `given`, which must be enough, or else `needed`."""
    if given is None:
        return needed
    static(name, given)
    if not (is_count(given, 0) and given >= needed):
        raise InvalidInputError(
            f"{name} must be an integer of at least {needed}, which this batch needs, got "
            f"{shown(given)}"
        )
    return int(given)

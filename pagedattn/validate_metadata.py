"""Checks of a batch: shapes and types always, values where they are known on the host."""

import numpy as np

from .batch import BatchMetadata
from .checks import ids, int_array, known_sizes, require, start_locs
from .facts import known, shown
from .integers import rising
from .ragged import cdiv, namespace
from .validate_values import is_static_count
from .visibility import key_range

ARRAYS = ("block_tables", "seq_lens", "query_start_loc", "slot_mapping", "positions")


def a_batch(batch) -> None:
    require(
        isinstance(batch, BatchMetadata),
        f"batch must be a BatchMetadata, got {type(batch).__name__}; make_batch makes one",
    )


def shapes(batch) -> None:
    """Requires a batch whose arrays are of integers and fit together."""
    a_batch(batch)
    for name in ("block_size", "max_query_len"):
        size = getattr(batch, name)
        static = is_static_count(size, int(name == "block_size"))
        require(static, f"batch.{name} must be a Python integer, got {shown(size)}")
    for name in ARRAYS:
        int_array(name, getattr(batch, name), 2 if name == "block_tables" else 1)
        known_sizes(name, getattr(batch, name))
    num_seqs = batch.num_seqs
    require(
        batch.block_tables.shape[0] == num_seqs and batch.query_start_loc.shape[0] == num_seqs + 1,
        f"with seq_lens of {num_seqs} sequences, block_tables must have as many rows and "
        f"query_start_loc one entry more, got {tuple(batch.block_tables.shape)} and "
        f"{tuple(batch.query_start_loc.shape)}",
    )
    require(
        len(batch.slot_mapping) == batch.num_tokens,
        f"slot_mapping must have the batch's {batch.num_tokens} tokens, got "
        f"{len(batch.slot_mapping)}",
    )


def fits(batch, cache) -> None:
    """Requires a batch that was made for blocks of the cache's size."""
    shapes(batch)
    require(
        batch.block_size == cache.block_size,
        f"the batch was made for blocks of {batch.block_size}, the cache has {cache.block_size}",
    )


def values(batch, num_blocks: int, window: int | None) -> None:
    """Requires starts, lengths and blocks in range, as far as they are known."""
    starts, seq_lens, table = (
        known(array) for array in (batch.query_start_loc, batch.seq_lens, batch.block_tables)
    )
    if starts is not None:
        start_locs("query_start_loc", starts, batch.num_tokens, batch.max_query_len)
    if seq_lens is None or table is None:
        return
    width = table.shape[1]
    needed = cdiv(seq_lens, batch.block_size)
    require(
        ((seq_lens >= 0) & (needed <= width)).all(),
        f"seq_lens must be between 0 and what {width} blocks of {batch.block_size} hold, got "
        f"{seq_lens.tolist()}",
    )
    if window is not None and starts is None:
        return  # unknown positions: any entry may lie behind the window
    first = first_columns(batch.block_size, seq_lens, starts, window)
    used = table[(np.arange(width) >= first[:, None]) & (np.arange(width) < needed[:, None])]
    require(
        not (used == -1).any(),
        "block_tables must name a block for all keys that the call may see, got -1: release_behind "
        "takes the widest window of its layers, after their attention",
    )
    ids("block_tables", used, num_blocks, "blocks")


def first_columns(block_size, seq_lens, starts, window):
    """The column of the first key that a sequence's queries see; no entry before it is followed.

    Of arrays of NumPy or JAX.
    """
    xp = namespace(seq_lens)
    if window is None:
        return xp.zeros_like(seq_lens)
    starts = np.maximum.accumulate(starts) if xp is np else rising(starts)
    query_lens = xp.diff(starts)
    context_lens = seq_lens - query_lens
    first, _ = key_range(context_lens, context_lens, seq_lens, False, window)
    return xp.where(query_lens > 0, first, seq_lens) // block_size

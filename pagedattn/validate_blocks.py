"""Checks of the arguments of the index arithmetic (`ragged`), which are returned as int32."""

from .checks import MAX_SLOTS, an_array, count, int_array, of_list, require, start_locs
from .facts import known
from .integers import int32, int32_array, rising


def starts(name, array):
    """Starts `[num_seqs + 1]`, which rise from 0; those of an empty batch are one 0."""
    array = int32_array(name, array, 1)
    require(len(array) > 0, f"{name} must be [num_seqs + 1], got no entry")
    values = known(array)
    if values is not None:
        start_locs(name, values, MAX_SLOTS, MAX_SLOTS)
    return rising(array)


def positions(query_start_loc, seq_lens, num_tokens):
    num_tokens = count("num_tokens", num_tokens, 0)
    query_start_loc = starts("query_start_loc", query_start_loc)
    seq_lens = int32_array("seq_lens", seq_lens, 1)
    require(
        len(query_start_loc) == len(seq_lens) + 1,
        f"query_start_loc must have one entry more than the {len(seq_lens)} of seq_lens, got "
        f"{len(query_start_loc)}",
    )
    return query_start_loc, seq_lens, num_tokens


def slots(block_tables, seq_ids, positions, block_size):
    block_size = count("block_size", block_size)
    block_tables = of_list("block_tables", block_tables)
    seq_ids, positions = of_list("seq_ids", seq_ids), of_list("positions", positions)
    int_array("block_tables", block_tables, 2)
    block_tables = int32(block_tables)  # no check of values: unused entries may hold anything
    an_array("seq_ids", seq_ids)
    an_array("positions", positions)
    require(
        tuple(seq_ids.shape) == tuple(positions.shape),
        f"seq_ids and positions must have one shape, got {tuple(seq_ids.shape)} and "
        f"{tuple(positions.shape)}",
    )
    seq_ids = int32_array("seq_ids", seq_ids, seq_ids.ndim)
    positions = int32_array("positions", positions, positions.ndim)
    return block_tables, seq_ids, positions, block_size


def fit_int32(blocks, fits, block_size):
    """Requires, where values are known, that the slots of all blocks in use fit int32."""
    values, fits = known(blocks), known(fits)
    if values is not None and fits is not None:
        require(
            fits.all(),
            f"slots must fit int32, but with block_size {block_size} those of blocks "
            f"{values[~fits][:8].tolist()} do not",
        )

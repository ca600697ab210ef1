"""Index arithmetic of the paged cache: which token stands where. Pure arrays, usable in jit."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int, Integer

from .._arrays.checks import MAX_SLOTS, an_array, count, int_array, of_list, start_locs
from .._arrays.devices import on_one_device
from .._arrays.inspect import known
from .._arrays.int32 import int32, int32_array, nondecreasing
from .._arrays.namespace import arange, as_dtype, in_range, namespace
from ..errors import InvalidInputError

PAD_SLOT = -1


def sequence_ids(
    query_start_loc: Integer[Any, "num_seqs_plus_1"], num_tokens: int
) -> Int[Any, "{num_tokens}"]:
    """The sequence that brought each token of the packed batch, -1 for padding tokens.

    Takes int32 arrays of any framework.

    >>> sequence_ids(jnp.array([0, 2, 2, 3]), 4).tolist()
    [0, 0, 2, -1]
    """
    xp, tokens = namespace(query_start_loc), arange(num_tokens, query_start_loc)
    if xp is jnp:
        # JAX would search by a loop, which a GPU runs as many small programs, one after the other;
        # and not at all inside a `jax.shard_map` over some axes of a mesh.
        begun = jnp.sum(query_start_loc[:, None] <= tokens[None, :], axis=0, dtype=jnp.int32)
    else:
        begun = xp.searchsorted(query_start_loc, tokens, side="right")
    owners = begun - 1
    return xp.where(tokens < query_start_loc[-1], as_dtype(owners, xp.int32), -1)


def token_positions(
    query_start_loc: Integer[Any, "num_seqs_plus_1"],
    seq_lens: Integer[Any, "num_seqs_plus_1-1"],
    num_tokens: int,
) -> Integer[Any, "{num_tokens}"]:
    """`positions` without its checks, for int32 arrays of any framework that fit together."""
    ids, tokens = sequence_ids(query_start_loc, num_tokens), arange(num_tokens, seq_lens)
    context_ends = (seq_lens - query_start_loc[1:])[ids] if len(seq_lens) else 0
    return namespace(seq_lens).where(ids >= 0, tokens + context_ends, 0)


@on_one_device
def positions(
    query_start_loc: Integer[Any, "num_seqs_plus_1"],
    seq_lens: Integer[Any, "num_seqs_plus_1-1"],
    num_tokens: int,
) -> Int[Array, "{num_tokens}"]:
    """The absolute position of each token of the packed batch, 0 for padding tokens.

    A sequence's new tokens are its last ones: they end at position `seq_len - 1`.

    Raises:
      InvalidInputError: arrays that are not of integers, or whose lengths do not fit together;
        outside jit also starts that fall, and values beyond int32.

    >>> positions(jnp.array([0, 2, 3]), jnp.array([2, 8]), 4).tolist()
    [0, 1, 7, 0]
    """
    query_start_loc, seq_lens, num_tokens = _checked_positions(
        query_start_loc, seq_lens, num_tokens
    )
    return token_positions(query_start_loc, seq_lens, num_tokens)


@on_one_device
def slot_mapping(
    block_tables: Integer[Any, "num_seqs max_blocks"],
    seq_ids: Integer[Any, "*tokens"],
    positions: Integer[Any, "*tokens"],
    *,
    block_size: int,
) -> Int[Array, "*tokens"]:
    """The slot `block * block_size + offset` of each position of a sequence: int32.

    -1 where there is none: the sequence id or the position is negative or past the table, or the
    table has a negative number there.
    Block ids are not compared with the size of any cache. A slot beyond int32 is an error outside
    jit, and -1 inside.

    Raises:
      InvalidInputError: arrays that are not of integers, or whose shapes do not fit together;
        outside jit also values and slots beyond int32.

    >>> slot_mapping(jnp.array([[5, 3]]), jnp.array([0, 0, -1]), jnp.array([1, 4, 0]), block_size=4)
    Array([21, 12, -1], dtype=int32)
    """
    block_tables, seq_ids, positions, block_size = _checked_slots(
        block_tables, seq_ids, positions, block_size
    )
    num_seqs, max_blocks = block_tables.shape
    columns = positions // block_size
    known = in_range(seq_ids, num_seqs) & in_range(columns, max_blocks)
    if num_seqs == 0 or max_blocks == 0:
        return jnp.full(known.shape, PAD_SLOT, jnp.int32)
    blocks = block_tables[jnp.where(known, seq_ids, 0), jnp.where(known, columns, 0)]
    known &= blocks >= 0
    fits = ~known | (blocks <= MAX_SLOTS // block_size - 1)
    _require_int32(blocks, fits, block_size)
    return jnp.where(known & fits, blocks * block_size + positions % block_size, PAD_SLOT)


def _starts(name, array):
    """Starts `[num_seqs + 1]`, which rise from 0; those of an empty batch are one 0."""
    array = int32_array(name, array, 1)
    if not len(array) > 0:
        raise InvalidInputError(f"{name} must be [num_seqs + 1], got no entry")
    values = known(array)
    if values is not None:
        start_locs(name, values, MAX_SLOTS, MAX_SLOTS)
    return nondecreasing(array)


def _checked_positions(query_start_loc, seq_lens, num_tokens):
    num_tokens = count("num_tokens", num_tokens, 0)
    query_start_loc = _starts("query_start_loc", query_start_loc)
    seq_lens = int32_array("seq_lens", seq_lens, 1)
    if len(query_start_loc) != len(seq_lens) + 1:
        raise InvalidInputError(
            f"query_start_loc must have one entry more than the {len(seq_lens)} of seq_lens, got "
            f"{len(query_start_loc)}"
        )
    return query_start_loc, seq_lens, num_tokens


def _checked_slots(block_tables, seq_ids, positions, block_size):
    block_size = count("block_size", block_size)
    block_tables = of_list("block_tables", block_tables)
    seq_ids, positions = of_list("seq_ids", seq_ids), of_list("positions", positions)
    int_array("block_tables", block_tables, 2)
    block_tables = int32(block_tables)  # no check of values: unused entries may hold anything
    an_array("seq_ids", seq_ids)
    an_array("positions", positions)
    if tuple(seq_ids.shape) != tuple(positions.shape):
        raise InvalidInputError(
            f"seq_ids and positions must have one shape, got {tuple(seq_ids.shape)} and "
            f"{tuple(positions.shape)}"
        )
    seq_ids = int32_array("seq_ids", seq_ids, seq_ids.ndim)
    positions = int32_array("positions", positions, positions.ndim)
    return block_tables, seq_ids, positions, block_size


def _require_int32(blocks, fits, block_size):
    """Requires, where values are known, that the slots of all blocks in use fit int32."""
    values, fits = known(blocks), known(fits)
    if values is not None and fits is not None and not fits.all():
        raise InvalidInputError(
            f"slots must fit int32, but with block_size {block_size} those of blocks "
            f"{values[~fits][:8].tolist()} do not"
        )

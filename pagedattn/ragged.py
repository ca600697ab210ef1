"""Index arithmetic of the paged cache: which token stands where. Pure arrays, usable in jit."""

import sys
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Integer, Shaped

from . import validate_blocks as validate
from .checks import MAX_SLOTS
from .integers import int32 as int32
from .placement import on_one_device

PAD_SLOT = -1


def cdiv(count, size):
    """`count / size`, rounded up; for integers and for arrays of any framework.

    >>> cdiv(17, 16)
    2
    """
    return -(-count // size)


def namespace(array) -> ModuleType:
    """The module whose functions take an array: torch, numpy (for plain numbers too) or jax.numpy.

    >>> namespace(np.arange(3)) is np
    True
    """
    if hasattr(array, "new_tensor"):
        return sys.modules["torch"]  # loaded already, since a tensor exists
    return np if isinstance(array, np.ndarray | np.generic | int | float) else jnp


def wide_dtype(array):
    """The dtype in which floats are computed: float64 for float64, else float32.

    By itself, since JAX told to promote strictly (jax_numpy_dtype_promotion) promotes no halves.

    >>> wide_dtype(np.ones(3, np.float16))
    <class 'numpy.float32'>
    """
    xp = namespace(array)
    return xp.float64 if array.dtype == xp.float64 else xp.float32


def as_dtype(array, dtype):
    """An array of any framework in a dtype. It stays on its device, whatever torch's default is."""
    if hasattr(array, "new_tensor"):
        return array.to(dtype)  # torch.asarray would move it
    return namespace(array).asarray(array, dtype=dtype)


def arange(count: int, like: Shaped[Any, "..."]) -> Int[Any, "{count}"]:
    """0, 1, ..., count - 1 as int32, in the framework and on the device of the array `like`.

    >>> arange(3, np.zeros(1))
    array([0, 1, 2], dtype=int32)
    """
    on_device = {"device": like.device} if hasattr(like, "new_tensor") else {}
    return namespace(like).arange(count, dtype=namespace(like).int32, **on_device)


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
    query_start_loc, seq_lens, num_tokens = validate.positions(
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

    -1 where there is none: the sequence id or the position is negative or lies past the table, or
    the table has no block there, but a negative number.
    Block ids are not compared with the size of any cache. A slot beyond int32 is an error outside
    jit, and -1 inside.

    Raises:
      InvalidInputError: arrays that are not of integers, or whose shapes do not fit together;
        outside jit also values and slots beyond int32.

    >>> slot_mapping(jnp.array([[5, 3]]), jnp.array([0, 0, -1]), jnp.array([1, 4, 0]), block_size=4)
    Array([21, 12, -1], dtype=int32)
    """
    block_tables, seq_ids, positions, block_size = validate.slots(
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
    validate.fit_int32(blocks, fits, block_size)
    return jnp.where(known & fits, blocks * block_size + positions % block_size, PAD_SLOT)


def in_range(ids: Integer[Any, "*n"], bound: int) -> Bool[Any, "*n"]:
    """True where an id may index an axis of length `bound`."""
    return (ids >= 0) & (ids < bound)


def set_at(array: Array, indices: Int[Array, "*n"], values, *, unique_indices=False) -> Array:
    """Writes rows; a negative index, or one past the end, writes nothing.

    Without wrap_negative_indices=False JAX would write -1 to the last row, even in drop mode.
    """
    return array.at[indices].set(
        values, mode="drop", wrap_negative_indices=False, unique_indices=unique_indices
    )


def add_at(array: Array, indices: Int[Array, "*n"], value) -> Array:
    """Adds to rows; a negative index, or one past the end, adds nothing."""
    return array.at[indices].add(value, mode="drop", wrap_negative_indices=False)

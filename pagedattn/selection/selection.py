"""Which blocks of its sequence a KV head attends to."""

from dataclasses import dataclass, field
from typing import Any, Generic

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Integer

from .._arrays.checks import flag, int_array, known_sizes
from .._arrays.inspect import describe, shown
from .._arrays.int32 import int32
from .._arrays.namespace import as_dtype, cdiv, namespace
from .._arrays.typing import ArrayT, is_torch
from ..errors import InvalidInputError

NONE = -1
LAST = np.iinfo(np.int32).max  # sorts behind all blocks


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Selection(Generic[ArrayT]):
    """The blocks that each KV head of each sequence attends to, at their true positions.

    It is a set: neither order nor duplicates matter, and blocks that the sequence does not have are
    nobody's. All queries of a sequence share it.

    Fields:
      blocks: their numbers in the sequence, columns of its row of the block table; -1 for none.
      ascending: that no row needs to be put in order: its numbers rise, and -1 comes last. That
        is what `select_blocks` says of its own; static.

    >>> from pagedattn import init_kv_cache, make_batch, paged_attention
    >>> batch = make_batch([1], [39], [[4, 0, 3, 1, 2]], block_size=8)
    >>> cache, query = init_kv_cache(5, 8, 1, 16), jnp.ones((1, 2, 16), jnp.bfloat16)
    >>> selection = Selection(jnp.array([[[4, 0, 1]]]))  # tokens 0 to 15, and 32 to 39
    >>> paged_attention(query, cache, batch, selection=selection).shape
    (1, 2, 16)
    """

    blocks: Integer[ArrayT, "num_seqs num_kv_heads num_selected"]
    ascending: bool = field(default=False, metadata={"static": True})


def in_order(
    selection: Selection[Any], seq_lens: Integer[Any, "num_seqs"], block_size: int, max_blocks: int
) -> Int[Any, "num_seqs num_kv_heads num_selected"]:
    """The blocks of each row in ascending order, once each, then -1: as backends take them.

    No more of them than a row of the block tables has. For arrays of any framework.

    >>> chosen = Selection(jnp.array([[[4, 0, 7, 0, -3]]]))
    >>> in_order(chosen, jnp.array([39]), block_size=8, max_blocks=9).tolist()
    [[[0, 4, -1, -1, -1]]]
    """
    blocks = _int32(selection.blocks)
    if not selection.ascending:
        blocks = _distinct(blocks, cdiv(seq_lens, block_size)[:, None, None])
    return blocks[..., :max_blocks]


def _int32(blocks):
    """As int32; numbers too large for it are none."""
    if not is_torch(blocks):
        return int32(blocks)
    xp = namespace(blocks)
    return as_dtype(as_dtype(blocks, xp.int64).clamp(NONE, LAST), xp.int32)


def _distinct(blocks, num_blocks):
    xp = namespace(blocks)
    blocks = _sorted(xp.where((blocks >= 0) & (blocks < num_blocks), blocks, LAST))
    first = xp.ones_like(blocks[..., :1]) > 0
    first = xp.concatenate([first, blocks[..., 1:] > blocks[..., :-1]], -1)
    blocks = _sorted(xp.where(first, blocks, LAST))
    return xp.where(blocks < LAST, blocks, NONE)


def _sorted(blocks):
    return blocks.sort(-1).values if is_torch(blocks) else jnp.sort(blocks)


def require_selection(selection) -> None:
    """Requires a Selection of at least one block a row."""
    if not isinstance(selection, Selection):
        raise InvalidInputError(
            f"selection must be a Selection, got {shown(selection)}: Selection(blocks) makes one "
            "of i32[num_seqs, num_kv_heads, num_selected], select_blocks the best one"
        )
    int_array("selection.blocks", selection.blocks, 3)
    known_sizes("selection.blocks", selection.blocks)
    flag("selection.ascending", selection.ascending)
    if not selection.blocks.shape[2] > 0:
        raise InvalidInputError(
            "selection.blocks must have room for at least one block, which may be -1, got "
            f"{describe(selection.blocks)}"
        )


def require_fit(selection: Selection, num_seqs: int, num_kv_heads: int) -> None:
    """Requires a row for each sequence of a batch and each KV head of a cache."""
    if tuple(selection.blocks.shape[:2]) != (num_seqs, num_kv_heads):
        raise InvalidInputError(
            "selection.blocks must be [num_seqs, num_kv_heads, num_selected] = "
            f"[{num_seqs}, {num_kv_heads}, at least 1], got {describe(selection.blocks)}"
        )


def require_ascending(blocks: np.ndarray | None) -> None:
    """Requires rows that rise, then -1, of values that are known."""
    if blocks is None:
        return
    before, after = blocks[..., :-1], blocks[..., 1:]
    if not ((after < 0) | ((before >= 0) & (before < after))).all():
        raise InvalidInputError(
            "selection.blocks must rise, with -1 behind them, where selection.ascending says so; "
            "without it they are put in order"
        )

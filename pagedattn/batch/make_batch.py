"""Batches from lists: built, validated and padded on the host."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer

from .._arrays.checks import count, distinct_slots
from ..errors import InvalidInputError
from . import validate
from .draft_tree import DraftTree, draft_tree, tree_positions
from .indices import PAD_SLOT, sequence_ids, token_positions
from .metadata import BatchMetadata

Lengths = Sequence[int] | Integer[Any, "n"]


def make_batch(
    query_lens: Lengths,
    context_lens: Lengths | None,
    block_tables: Sequence[Lengths] | Integer[Any, "num_seqs max_blocks"],
    *,
    block_size: int,
    key_lens: Lengths | None = None,
    parents: Lengths | None = None,
    pad_tokens: int | None = None,
    pad_seqs: int | None = None,
    pad_blocks: int | None = None,
    max_query_len: int | None = None,
) -> BatchMetadata[Array]:
    """Builds and validates a batch on the host from lists or arrays.

    Args:
      query_lens: new tokens of each sequence.
      context_lens: tokens of each sequence that the cache holds already.
      block_tables: a row of block ids for each sequence (rows may differ in length), or an array.
      block_size: tokens a block.
      key_lens: the number of keys of each sequence, given instead of `context_lens` (then None)
        when all keys are in the cache already. The context is `key_len - query_len`, and all slots
        are -1: this batch writes nothing. Use it for cross attention, where another batch has
        written the keys, in tables of their own; and to attend again to written tokens, where
        sequences may share even their last blocks.
      parents: of draft trees, for each token the index, among its sequence's new ones, of
        the token before it; -1 for those that follow the context. A token sees the context and its
        own line of descent, and stands at position `context_len + depth`; its slot is that of
        position `context_len + index`. None: each token follows the one before it.
      pad_tokens, pad_seqs, pad_blocks: lengths of the token axis, of the sequence axis and of a
        table row after padding; None pads nothing. Few distinct values mean few compilations.
      max_query_len: the static bound on query lengths; None takes the longest, rounded up to a
        power of two, so that close lengths share a program.

    Returns:
      a `BatchMetadata` of int32 JAX arrays; padding tokens have slot -1 and position 0, padding
      sequences have no queries and no keys, padding entries of tables are -1.

    Raises:
      InvalidInputError: lengths that are not non-negative integers, lists of different lengths,
        a table row too short for its sequence, a used block id below 0, two tokens with one
        slot, a parent that does not come before its token, a padding too small.

    >>> batch = make_batch([3, 1], [0, 4], [[7], [2, 5]], block_size=4)
    >>> batch.slot_mapping.tolist(), batch.positions.tolist()
    ([28, 29, 30, 20], [0, 1, 2, 4])
    >>> again = make_batch([1, 1], None, [[2, 5], [2, 5]], key_lens=[6, 6], block_size=4)
    >>> again.slot_mapping.tolist(), again.positions.tolist()
    ([-1, -1], [5, 5])
    >>> tree = make_batch([3], [4], [[2, 5]], parents=[-1, 0, 0], block_size=4)
    >>> tree.slot_mapping.tolist(), tree.positions.tolist()
    ([20, 21, 22], [4, 5, 5])
    """
    query_lens = validate.lengths("query_lens", query_lens)
    seq_lens = _seq_lens(query_lens, context_lens, key_lens)
    block_size = count("block_size", block_size)
    tables = validate.tables(block_tables, seq_lens, block_size)
    starts = np.append(0, np.cumsum(query_lens))
    seq_ids = sequence_ids(starts, int(starts[-1]))
    positions = token_positions(starts, seq_lens, len(seq_ids))
    slots = _slots(tables, seq_ids, positions, block_size, written=key_lens is not None)
    num_seqs = validate.padding("pad_seqs", len(query_lens), pad_seqs)
    num_tokens = validate.padding("pad_tokens", len(seq_ids), pad_tokens)
    max_blocks = validate.padding("pad_blocks", tables.shape[1], pad_blocks)
    longest = _bound(query_lens.max(initial=1), max_query_len)
    tree = None
    if parents is not None:
        tree = draft_tree(validate.parents(parents, query_lens), starts, longest)
        positions = tree_positions(starts, seq_lens, tree)
    return BatchMetadata(
        block_tables=_padded(tables, (num_seqs, max_blocks), -1),
        seq_lens=_padded(seq_lens, (num_seqs,), 0),
        query_start_loc=_padded(starts, (num_seqs + 1,), len(seq_ids)),
        slot_mapping=_padded(slots, (num_tokens,), PAD_SLOT),
        positions=_padded(positions, (num_tokens,), 0),
        block_size=block_size,
        max_query_len=longest,
        tree=None if tree is None else _padded_tree(tree, num_tokens),
    )


def _seq_lens(query_lens, context_lens, key_lens):
    if (context_lens is None) == (key_lens is None):
        given = "neither" if key_lens is None else "both"
        raise InvalidInputError(f"context_lens or key_lens must be None, and not both, got {given}")
    if key_lens is not None:
        return validate.lengths("key_lens", key_lens, like=query_lens)
    return query_lens + validate.lengths("context_lens", context_lens, like=query_lens)


def _slots(tables, seq_ids, positions, block_size, *, written):
    if written:
        return np.full(len(seq_ids), PAD_SLOT)
    slots = tables[seq_ids, positions // block_size] * block_size + positions % block_size
    distinct_slots(slots)
    return slots


def _bound(longest, max_query_len):
    if max_query_len is None:
        return 1 << (int(longest) - 1).bit_length()
    return validate.padding("max_query_len", int(longest), max_query_len)


def _padded_tree(tree, num_tokens) -> DraftTree[Array]:
    return DraftTree(
        parents=_padded(tree.parents, (num_tokens,), -1),
        depths=_padded(tree.depths, (num_tokens,), 0),
        ancestors=_padded(tree.ancestors, (num_tokens, tree.ancestors.shape[1]), 0),
    )


def _padded(array, shape, fill) -> Array:
    padded = np.full(shape, fill, np.int32)
    padded[tuple(slice(length) for length in array.shape)] = array
    return jnp.asarray(padded)

"""What one step attends to: the batch as arrays."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from . import validate_batch as validate
from .blocks import PAD_SLOT
from .checks import distinct_slots
from .integers import int32, rising


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BatchMetadata:
    """A packed, padded batch of sequences: int32 arrays, and two static integers.

    Sequence s brings `query_lens[s]` new tokens, packed one sequence after the other, on top of
    `context_lens[s]` cached ones; `seq_lens` counts both. Lengths are arrays, so a decode step
    does not retrace; only shapes and the static fields do.

    Fields:
      block_tables: the blocks of each sequence in logical order; entries past
        `ceil(seq_len / block_size)` may hold anything and are never followed.
      seq_lens: tokens of each sequence after this step (cross attention: its number of keys).
      query_start_loc: where each sequence's tokens start in the packed axis, and where the last
        one's end; tokens from there on are padding. Behind the last sequence the starts may stay
        at that end, or be 0.
      slot_mapping: the slot each token is written to, -1 for none.
      positions: the absolute position of each token.
      block_size: tokens a block; static.
      max_query_len: an upper bound on the query lengths; static.
    """

    block_tables: Int[Any, "num_seqs max_blocks"]
    seq_lens: Int[Any, "num_seqs"]
    query_start_loc: Int[Any, "num_seqs_plus_1"]
    slot_mapping: Int[Any, "num_tokens"]
    positions: Int[Any, "num_tokens"]
    block_size: int = field(metadata={"static": True})
    max_query_len: int = field(metadata={"static": True})

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def max_blocks(self) -> int:
        return self.block_tables.shape[1]

    @property
    def query_lens(self) -> Int[Any, "num_seqs"]:
        return self.query_start_loc[1:] - self.query_start_loc[:-1]

    @property
    def context_lens(self) -> Int[Any, "num_seqs"]:
        return self.seq_lens - self.query_lens


def make_batch(
    query_lens,
    context_lens,
    block_tables,
    *,
    block_size: int,
    key_lens=None,
    pad_tokens: int | None = None,
    pad_seqs: int | None = None,
    pad_blocks: int | None = None,
    max_query_len: int | None = None,
) -> BatchMetadata:
    """Builds and validates a batch on the host from lists or arrays.

    Args:
      query_lens: new tokens of each sequence.
      context_lens: tokens of each sequence that the cache holds already.
      block_tables: a row of block ids for each sequence (rows may differ in length), or an array.
      block_size: tokens a block.
      key_lens: the number of keys of each sequence, all of them written already, in place of
        `context_lens` (which may then be None): context is `key_len - query_len`, nothing is to be
        written, and all slots are -1. For cross attention, whose keys have tables of their own and
        are written by the batch that brings them, independent of the queries; and to attend
        again to tokens that are written, where sequences may share their last blocks too.
      pad_tokens, pad_seqs, pad_blocks: lengths of the token axis, of the sequence axis and of a
        table row after padding; None pads nothing. Few distinct values mean few compilations.
      max_query_len: the static bound on query lengths; None takes the longest, rounded up to a
        power of two, so that close lengths share a program.

    Raises:
      InvalidInputError: lengths that are not non-negative integers, lists of different lengths,
        a table row too short for its sequence, a used block id below 0, two tokens with one
        slot, a padding too small.

    >>> batch = make_batch([3, 1], [0, 4], [[7], [2, 5]], block_size=4)
    >>> batch.slot_mapping.tolist(), batch.positions.tolist()
    ([28, 29, 30, 20], [0, 1, 2, 4])
    >>> again = make_batch([1, 1], None, [[2, 5], [2, 5]], key_lens=[6, 6], block_size=4)
    >>> again.slot_mapping.tolist(), again.positions.tolist()
    ([-1, -1], [5, 5])
    """
    query_lens = validate.lengths("query_lens", query_lens)
    seq_lens = _seq_lens(query_lens, context_lens, key_lens)
    block_size = validate.block_size(block_size)
    tables = validate.tables(block_tables, seq_lens, block_size)
    ends = np.cumsum(query_lens)
    seq_ids = np.repeat(np.arange(len(query_lens)), query_lens)
    positions = np.arange(len(seq_ids)) + (seq_lens - ends)[seq_ids]
    slots = _slots(tables, seq_ids, positions, block_size, written=key_lens is not None)
    num_seqs = validate.padding("pad_seqs", len(query_lens), pad_seqs)
    num_tokens = validate.padding("pad_tokens", len(seq_ids), pad_tokens)
    max_blocks = validate.padding("pad_blocks", tables.shape[1], pad_blocks)
    return BatchMetadata(
        block_tables=_padded(tables, (num_seqs, max_blocks), -1),
        seq_lens=_padded(seq_lens, (num_seqs,), 0),
        query_start_loc=_padded(np.append(0, ends), (num_seqs + 1,), len(seq_ids)),
        slot_mapping=_padded(slots, (num_tokens,), PAD_SLOT),
        positions=_padded(positions, (num_tokens,), 0),
        block_size=block_size,
        max_query_len=_bound(query_lens.max(initial=1), max_query_len),
    )


def as_int32(batch: BatchMetadata) -> BatchMetadata:
    """The batch as backends take it: int32 arrays, and starts that do not fall into padding."""
    arrays = jax.tree.map(int32, batch)
    return replace(arrays, query_start_loc=rising(arrays.query_start_loc))


def _seq_lens(query_lens, context_lens, key_lens):
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


def _padded(array, shape, fill) -> Array:
    padded = np.full(shape, fill, np.int32)
    padded[tuple(slice(length) for length in array.shape)] = array
    return jnp.asarray(padded)

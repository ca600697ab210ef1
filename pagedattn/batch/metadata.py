"""What one step attends to: the batch as arrays."""

from dataclasses import dataclass, field, replace
from typing import Any, Generic

import jax
from jaxtyping import Integer

from .._arrays.int32 import int32, nondecreasing
from .._arrays.typing import ArrayT
from .draft_tree import DraftTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sequences(Generic[ArrayT]):
    """What a backend reads of a batch: the keys of each sequence, and the tokens it brings.

    Fields:
      block_tables: the blocks of each sequence in logical order; entries past
        `ceil(seq_len / block_size)`, and of blocks behind the windows of all queries, may hold
        anything and are never followed.
      seq_lens: tokens of each sequence after this step (cross attention: its number of keys); 0
        for a sequence that a pool had no room for: its queries see nothing.
      query_start_loc: sequence s brings the packed tokens from entry s up to entry s + 1. Tokens
        after those of the last sequence are padding. Entries of padding sequences repeat the end
        of the last sequence, or are 0.
      tree: the ancestors of each token, where they are draft trees; None where each
        token follows the one before it.
    """

    block_tables: Integer[ArrayT, "num_seqs max_blocks"]
    seq_lens: Integer[ArrayT, "num_seqs"]
    query_start_loc: Integer[ArrayT, "num_seqs+1"]
    tree: DraftTree[ArrayT] | None = field(default=None, kw_only=True)

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def max_blocks(self) -> int:
        return self.block_tables.shape[1]

    @property
    def query_lens(self) -> Integer[Any, "num_seqs"]:
        return self.query_start_loc[1:] - self.query_start_loc[:-1]

    @property
    def context_lens(self) -> Integer[Any, "num_seqs"]:
        return self.seq_lens - self.query_lens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BatchMetadata(Sequences[ArrayT]):
    """A packed, padded batch of sequences: int32 arrays, and two static integers.

    Sequence s brings `query_lens[s]` new tokens, packed one sequence after the other, on top of
    `context_lens[s]` cached ones; `seq_lens` counts both. Lengths are arrays, so a jitted step is
    traced again only for other shapes or other static fields, not for other lengths.

    Fields, in addition to those of `Sequences`:
      slot_mapping: the slot each token is written to, -1 for none.
      positions: the absolute position of each token.
      block_size: tokens a block; static.
      max_query_len: an upper bound on the query lengths; static.

    >>> from pagedattn import make_batch
    >>> batch = make_batch([3, 1], [0, 4], [[7], [2, 5]], block_size=4)
    >>> batch.num_tokens, batch.query_lens.tolist(), batch.context_lens.tolist()
    (4, [3, 1], [0, 4])
    """

    slot_mapping: Integer[ArrayT, "num_tokens"]
    positions: Integer[ArrayT, "num_tokens"]
    block_size: int = field(metadata={"static": True})
    max_query_len: int = field(metadata={"static": True})

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]


def sequences_of(batch: BatchMetadata) -> Sequences:
    """The part of a batch that backends read, as int32."""
    tables, lens = int32(batch.block_tables), int32(batch.seq_lens)
    tree = jax.tree.map(int32, batch.tree)
    return Sequences(tables, lens, int32(batch.query_start_loc), tree=tree)


def nondecreasing_starts(batch: Sequences) -> Sequences:
    """The same sequences with starts that never fall: those padded with 0 become the end.

    >>> import numpy as np
    >>> batch = Sequences(np.zeros((3, 1)), np.array([3, 1, 0]), np.array([0, 3, 4, 0]))
    >>> nondecreasing_starts(batch).query_start_loc.tolist()
    [0, 3, 4, 4]
    """
    return replace(batch, query_start_loc=nondecreasing(batch.query_start_loc))

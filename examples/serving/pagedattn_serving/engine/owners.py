"""Who owns which block of the pool."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from pagedattn.extend import cdiv
from pagedattn_serving.blocks.memory import Memory
from pagedattn_serving.decoding.request import Group

FREE, CACHED = -1, -2  # owners of a block: nobody, and the prefix cache alone
Owners = Int[np.ndarray, "*steps num_blocks"]


class Holdings(NamedTuple):
    """Who has which blocks at a moment.

    Fields:
      ref_counts, tables: those of the pools, whose blocks are counted on from one to the next; -1
        for what was given back.
      block_size: tokens a block.
      held: (request id, row, cached tokens) of each running sequence, the oldest request first.
    """

    ref_counts: Int[np.ndarray, " num_blocks"]
    tables: Int[np.ndarray, "num_pools max_seqs max_blocks"]
    block_size: int
    held: list[tuple[int, int, int]]

    def owners(self) -> Int[np.ndarray, " num_blocks"]:
        """The request in each block, the oldest if several share it; or `FREE` or `CACHED`."""
        owners = np.where(self.ref_counts > 0, CACHED, FREE)
        for request, row, num_cached in reversed(self.held):
            blocks = self.tables[:, row, : cdiv(num_cached, self.block_size)]
            owners[blocks[blocks >= 0]] = request
        return owners


def holdings_of(memory: Memory, groups: list[Group]) -> Holdings:
    held = [(g.request.id, s.row, s.num_cached) for g in groups for s in g.sequences]
    ref_counts = np.concatenate([blocks.ref_counts() for blocks in memory.pools])
    firsts = np.cumsum([0, *memory.num_blocks[:-1]])
    tables = np.stack([blocks.tables() for blocks in memory.pools])
    tables = np.where(tables >= 0, tables + firsts[:, None, None], -1)
    return Holdings(ref_counts, tables, memory.limits.block_size, held)

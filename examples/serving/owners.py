"""Who owns which block of the pool."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from pagedattn.ragged import cdiv
from serving.memory import Memory
from serving.request import Group

FREE, CACHED = -1, -2  # owners of a block: nobody, and the prefix cache alone
Owners = Int[np.ndarray, "*steps num_blocks"]


class Holdings(NamedTuple):
    """Who has which blocks at a moment.

    Fields:
      ref_counts, tables: those of the pool.
      block_size: tokens a block.
      held: (request id, row, cached tokens) of each running sequence, the oldest request first.
    """

    ref_counts: Int[np.ndarray, " num_blocks"]
    tables: Int[np.ndarray, "max_seqs max_blocks"]
    block_size: int
    held: list[tuple[int, int, int]]

    def owners(self) -> Int[np.ndarray, " num_blocks"]:
        """The request in each block, the oldest if several share it; or `FREE` or `CACHED`."""
        owners = np.where(self.ref_counts > 0, CACHED, FREE)
        for request, row, num_cached in reversed(self.held):
            owners[self.tables[row, : cdiv(num_cached, self.block_size)]] = request
        return owners


def holdings_of(memory: Memory, groups: list[Group]) -> Holdings:
    held = [(g.request.id, s.row, s.num_cached) for g in groups for s in g.sequences]
    return Holdings(memory.ref_counts(), memory.tables(), memory.limits.block_size, held)

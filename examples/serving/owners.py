"""Who owns which block of the pool."""

import numpy as np
from jaxtyping import Int

from pagedattn.ragged import cdiv
from serving.memory import Memory
from serving.request import Group

FREE, CACHED = -1, -2  # owners of a block: nobody, and the prefix cache alone
Owners = Int[np.ndarray, "*steps num_blocks"]


def owners_of(memory: Memory, groups: list[Group]) -> Int[np.ndarray, " num_blocks"]:
    """The request that owns each block, the oldest if several share it; or `FREE` or `CACHED`."""
    owners = np.where(memory.ref_counts() > 0, CACHED, FREE)
    tables, block_size = memory.tables(), memory.limits.block_size
    for group in reversed(groups):
        for sequence in group.sequences:
            used = cdiv(sequence.num_cached, block_size)
            owners[tables[sequence.row, :used]] = group.request.id
    return owners

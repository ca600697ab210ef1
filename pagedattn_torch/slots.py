"""Whether the slots of a batch are where its block tables will look for them."""

import numpy as np

from pagedattn import BatchMetadata, InvalidInputError
from pagedattn.checks import known


def check_slots(batch: BatchMetadata) -> None:
    """New tokens must be written where their positions are read; slots of -1 write nothing.

    Nothing is checked while values are unknown.

    Raises:
      InvalidInputError: a slot belongs to another position or block.
    """
    arrays = batch.slot_mapping, batch.positions, batch.query_start_loc, batch.block_tables
    slots, positions, starts, tables = (known(array) for array in arrays)
    if slots is None or positions is None or starts is None or tables is None:
        return
    seqs = np.repeat(np.arange(len(starts) - 1), np.diff(starts))[: len(slots)]
    slots, positions = slots[: len(seqs)], positions[: len(seqs)]
    columns = positions // batch.block_size
    inside = (slots >= 0) & (positions >= 0) & (columns < tables.shape[1])
    blocks = tables[seqs, np.where(inside, columns, 0)]
    wrong = inside & (slots != blocks * batch.block_size + positions % batch.block_size)
    if wrong.any():
        token = int(wrong.argmax())
        raise InvalidInputError(
            f"slot_mapping and block_tables must agree, but token {token}, at position "
            f"{positions[token]} of its sequence, has slot {slots[token]}, and block "
            f"{blocks[token]} of {batch.block_size} is read for it; block_tables hold the "
            "blocks of new tokens too"
        )

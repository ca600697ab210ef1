"""Makes and checks that block tables find new tokens in the slots they are written to."""

import dataclasses

import numpy as np
import torch

from pagedattn import BatchMetadata, InvalidInputError
from pagedattn._arrays.inspect import known
from pagedattn._arrays.namespace import cdiv
from pagedattn.batch.indices import sequence_ids


def completed(batch: BatchMetadata, max_seq_len: int | None) -> BatchMetadata:
    """The batch with block tables that hold the blocks of new tokens too, taken from its slots.

    Only blocks without context tokens are added: the tables hold the others already. The host reads
    no values.

    Args:
      max_seq_len: a bound on the lengths of sequences that bring several tokens; None if unknown.

    >>> batch = BatchMetadata(torch.tensor([[7]]), torch.tensor([4]), torch.tensor([0, 3]),
    ...                       torch.tensor([15, 10, 11]), torch.tensor([1, 2, 3]),
    ...                       block_size=2, max_query_len=3)
    >>> completed(batch, 4).block_tables
    tensor([[7, 5]])
    """
    size, width = batch.block_size, _width(batch, max_seq_len)
    slots, positions, starts, contexts = (
        x.to(batch.block_tables.device)
        for x in (batch.slot_mapping, batch.positions, batch.query_start_loc, batch.context_lens)
    )
    seqs, columns = sequence_ids(starts, batch.num_tokens), positions // size
    held = (slots >= 0) & (seqs >= 0) & (columns * size >= contexts[seqs])
    # Tokens that add no block write to a spare column, which is cut off below.
    columns = torch.where(held, columns, width).clamp(0, width).long()
    tables = torch.nn.functional.pad(
        batch.block_tables, (0, width + 1 - batch.max_blocks), value=-1
    )
    tables[seqs, columns] = (slots // size).to(tables.dtype)
    return dataclasses.replace(batch, block_tables=tables[:, :width].contiguous())


def _width(batch, max_seq_len) -> int:
    """Enough columns for every sequence, given that the tables hold all contexts."""
    new = cdiv(batch.max_query_len, batch.block_size)
    needed = batch.max_blocks + new if max_seq_len is None else cdiv(max_seq_len, batch.block_size)
    return max(batch.max_blocks, needed)


def check_contexts(batch: BatchMetadata) -> None:
    """Requires, if values are known, tables wide enough for the blocks of every context.

    Raises:
      InvalidInputError: they are too narrow.
    """
    contexts, room = known(batch.context_lens), batch.max_blocks * batch.block_size
    if contexts is not None and (contexts > room).any():
        raise InvalidInputError(
            f"block_tables must hold the blocks of every context, but their {batch.max_blocks} "
            f"columns of {batch.block_size} tokens hold {room} of context_lens "
            f"{contexts.tolist()}; make them as wide as seq_lens need"
        )


def check_slots(batch: BatchMetadata) -> None:
    """Requires that new tokens are written where they are read later; slots of -1 are fine.

    Nothing is checked if values are unknown.

    Raises:
      InvalidInputError: a slot belongs to another position or block.
    """
    arrays = batch.slot_mapping, batch.positions, batch.query_start_loc, batch.block_tables
    slots, positions, starts, tables = (known(array) for array in arrays)
    if slots is None or positions is None or starts is None or tables is None:
        return
    seqs, columns = sequence_ids(starts, batch.num_tokens), positions // batch.block_size
    inside = (seqs >= 0) & (slots >= 0) & (positions >= 0) & (columns < tables.shape[1])
    blocks = tables[seqs, np.where(inside, columns, 0)]
    wrong = inside & (slots != blocks * batch.block_size + positions % batch.block_size)
    if wrong.any():
        token = int(wrong.argmax())
        raise InvalidInputError(
            f"slot_mapping and block_tables must agree, but token {token}, at position "
            f"{positions[token]} of its sequence, has slot {slots[token]}, and block "
            f"{blocks[token]} of {batch.block_size} is read for it; a block holds tokens in their "
            "order, and block_tables those of decodes, and of blocks begun before, too"
        )

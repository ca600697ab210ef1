"""The next step of a metadata's sequences, one sampled token each, made in place."""

from typing import Any

import torch
from torch import Tensor

from pagedattn import InvalidInputError
from pagedattn._arrays.checks import count
from pagedattn._arrays.inspect import known, shown

from ...arrays import require_tensors, require_writable

# What is derived anew from the lengths.
DERIVED = ("context_lens_tensor", "seq_start_loc", "max_decode_seq_len", "max_prefill_seq_len",
           "max_query_len", "max_decode_query_len", "is_prompt")  # fmt: skip


def advance(
    meta, model_input: Any, sampled: Tensor | None, block_size: int, num_seqs: int, num_queries: int
) -> None:
    """Writes the next step to the tensors of the metadata and of its model's input."""
    lens, size = meta.seq_lens_tensor, count("block_size", block_size)
    slots, listed = meta.slot_mapping[:num_seqs], meta.seq_lens
    positions = lens[:num_queries].clone()
    found = _slots(meta.block_tables, positions, size)
    inputs = {"input_positions": positions}
    if sampled is not None:
        require_tensors(sampled_token_ids=sampled)
        inputs["input_tokens"] = sampled.flatten()[:num_queries]
    _require_room(model_input, inputs, num_queries)
    require_writable(seq_lens_tensor=lens, slot_mapping=slots)
    lens[:num_queries] += 1
    slots[:num_queries] = found
    slots[num_queries:] = -1
    for name, values in inputs.items():
        getattr(model_input, name)[:num_queries] = values
    if meta.num_prefills:
        meta.query_start_loc = torch.arange(num_queries + 1, dtype=torch.int32, device=lens.device)
    for name in DERIVED:
        setattr(meta, name, None)
    counts = {"num_prefills": 0, "num_prefill_tokens": 0, "num_decode_tokens": num_seqs}
    longer = listed and [n + (seq < num_queries) for seq, n in enumerate(listed)]
    fields = {"slot_mapping": slots, "seq_lens": longer, "seq_lens_tensor": lens}
    for name, value in (counts | fields).items():
        setattr(meta, name, value)


def check(meta, num_seqs: int, num_queries: int, turn_prefills_into_decodes: bool) -> None:
    """Requires a step whose sequences can all go on by one token."""
    got = 0 if meta.seq_lens_tensor is None else len(meta.seq_lens_tensor)
    if not (got == num_seqs and 0 <= num_queries <= num_seqs):
        raise InvalidInputError(
            f"num_seqs must be the metadata's {got}, and num_queries at most that, got {num_seqs} "
            f"and {num_queries}"
        )
    if not turn_prefills_into_decodes and meta.num_prefills:
        raise InvalidInputError(
            f"advance_step takes decodes alone, got {meta.num_prefills} prefills; "
            "turn_prefills_into_decodes=True makes them decodes"
        )
    missing = [name for name in ("slot_mapping", "block_tables") if getattr(meta, name) is None]
    if missing:
        raise InvalidInputError(f"advance_step needs {', '.join(missing)}, got None")


def _require_room(model_input, inputs: dict[str, Tensor], num_queries: int) -> None:
    """Requires a value for each query, and tensors of the model's input that hold them."""
    for name, values in inputs.items():
        held = getattr(model_input, name, None)
        if len(values) < num_queries or not isinstance(held, Tensor) or len(held) < num_queries:
            raise InvalidInputError(
                f"advance_step writes {num_queries} values to the model's {name}, got "
                f"{len(values)} for {shown(held)}"
            )
        require_writable(**{f"the model's {name}": held})


def _slots(tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    if tables.ndim != 2 or len(tables) < len(positions):
        raise InvalidInputError(
            f"block_tables must be [{len(positions)}, max_blocks], a row for each sequence, got "
            f"{list(tables.shape)}"
        )
    columns = (positions // block_size).long()
    values = known(columns)
    if values is not None and len(values) and not int(values.max()) < tables.shape[1]:
        raise InvalidInputError(
            f"block_tables must hold the blocks of the next tokens, but have {tables.shape[1]} "
            f"columns of {block_size} tokens for positions {positions.tolist()}"
        )
    blocks = tables[: len(columns)].gather(1, columns[:, None])[:, 0].long()
    values = known(blocks)
    if values is not None and (values < 0).any():
        raise InvalidInputError(
            "block_tables must hold the blocks of the next tokens, got "
            f"{values.tolist()} for positions {positions.tolist()}"
        )
    return blocks * block_size + positions % block_size

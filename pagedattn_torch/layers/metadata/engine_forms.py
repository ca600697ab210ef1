"""Fields as v0 engines give them, brought to the one meaning that all else reads.

- CPU and XPU runners pass `torch.tensor([])`, of float32, for what a step does not have.
- vLLM's XPU runner calls the starts of prompts `seqlen_q`, and the longest of them `max_seqlen`.
- vLLM's CPU runner since 0.6.4, which sets `chunked_prefill`, keeps prefills and decodes apart:
  `seq_lens`, `query_start_loc` and `prefill_block_tables` are the prefills', `seq_lens_tensor` and
  `block_tables` are the decodes', if there are any.
- Its builder cuts the lengths and tables of decodes to the window, but not `context_lens_tensor`.

What has its one meaning already is kept, so fields may come this way twice.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pagedattn import InvalidInputError
from pagedattn._arrays.inspect import known
from pagedattn.batch import validate as validate_batch

LENGTHS = ("seq_lens_tensor", "context_lens_tensor", "query_start_loc", "seq_start_loc")


def in_one_meaning(meta) -> dict[str, Any]:
    """The fields to replace."""
    absent = {name: None for name in (*LENGTHS, "seqlen_q") if _says_nothing(getattr(meta, name))}
    if meta.slot_mapping is not None and not meta.slot_mapping.numel() and _num_tokens(meta):
        absent["slot_mapping"] = None  # of models that cache nothing
    meta = SimpleNamespace(**vars(meta) | absent)
    return absent | _starts(meta) | ({} if meta.chunked_prefill is None else _joined(meta))


def cut_contexts(meta, contexts: Tensor | None, derived: Tensor) -> Tensor | None:
    """The given contexts, but those of decodes as their cut lengths say.

    Values on a GPU are not read: there they stay as they are given.
    """
    values, expected = (None if x is None else known(x) for x in (contexts, derived))
    if contexts is None or values is None or expected is None or values.shape != expected.shape:
        return contexts
    first = meta.num_prefills
    longer = values[first:] > expected[first:]
    if not longer.any() or (values[first:] < expected[first:]).any():
        return contexts
    return torch.cat([contexts[:first], derived[first:].to(contexts)])


def _says_nothing(array) -> bool:
    integers = array is not None and not (array.is_floating_point() or array.is_complex())
    return array is not None and not integers and not array.numel()


def _num_tokens(meta) -> int:
    return meta.num_prefill_tokens + meta.num_decode_tokens


def _starts(meta) -> dict[str, Any]:
    """What IPEX's fields say of prompts."""
    fields: dict[str, Any] = {}
    if not meta.num_prefills or meta.num_decode_tokens:
        return fields
    if meta.query_start_loc is None and meta.seqlen_q is not None:
        fields["query_start_loc"] = meta.seqlen_q
    if meta.max_query_len is None and meta.max_seqlen:
        fields["max_query_len"] = meta.max_seqlen
    return fields


def _joined(meta) -> dict[str, Any]:
    """Prefills and decodes in one."""
    fields = {"block_tables": _tables(meta)}
    if meta.max_prefill_seq_len is None:
        fields["max_prefill_seq_len"] = meta.max_kv_len
    decodes, starts = meta.num_decode_tokens, meta.query_start_loc
    if not decodes:
        return fields
    if starts is not None and len(starts) == meta.num_prefills + 1:
        more = torch.arange(1, decodes + 1, dtype=starts.dtype, device=starts.device)
        fields["query_start_loc"] = torch.cat([starts, starts[-1:] + more])
    return fields | _lengths(meta)


def _lengths(meta) -> dict[str, Any]:
    listed, decodes = meta.seq_lens, meta.seq_lens_tensor
    if listed is None or decodes is None:
        return {}
    listed = validate_batch.lengths("seq_lens", listed).tolist()
    if len(listed) != meta.num_prefills or len(decodes) != meta.num_decode_tokens:
        return {}
    values = known(decodes)
    prefills = torch.tensor(listed, dtype=decodes.dtype, device=decodes.device)
    return {
        "seq_lens": None if values is None else listed + values.tolist(),
        "seq_lens_tensor": torch.cat([prefills, decodes]),
    }


def _tables(meta) -> Tensor | None:
    """A row for each sequence; that of a prompt whose table is not given is never read."""
    count, prefills, decodes = meta.num_prefills, meta.prefill_block_tables, meta.block_tables
    if prefills is not None and len(prefills) != count:
        raise InvalidInputError(
            f"prefill_block_tables must have a row for each of {count} prefills, got "
            f"{0 if prefills is None else len(prefills)}"
        )
    if decodes is None or not decodes.numel():
        return decodes if prefills is None or meta.num_decode_tokens else prefills
    if not count or len(decodes) != meta.num_decode_tokens:
        return decodes
    prefills = decodes.new_zeros(count, 0) if prefills is None else prefills
    width = max(prefills.shape[1], decodes.shape[1])
    rows = [torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in (prefills, decodes)]
    return torch.cat(rows)

"""Derives the fields of metadata that were not given, and checks that the given ones agree."""

import torch

from pagedattn import InvalidInputError
from pagedattn._arrays.checks import flag, is_count
from pagedattn._arrays.inspect import known, shown

from ...arrays import tensor
from .bias_fields import check_lists
from .engine_forms import cut_contexts
from .lengths import agreed, both_forms, bound, nondecreasing_starts, span_lengths, start_locs

COUNTS = ("num_prefills", "num_prefill_tokens", "num_decode_tokens")
BOUNDS = (
    "max_query_len",
    "max_decode_query_len",
    "max_prefill_seq_len",
    "max_decode_seq_len",
    "max_encoder_seq_len",
    "num_encoder_tokens",
    "max_seqlen",
    "max_kv_len",
)


def check_counts(meta) -> dict:
    """Counts and bounds as Python integers; counts of a step of encoders alone may be None: 0."""
    flag("use_cuda_graph", meta.use_cuda_graph)
    check_lists(meta)
    given = {name: getattr(meta, name) for name in COUNTS + BOUNDS}
    if meta.seq_lens is None and meta.seq_lens_tensor is None:
        given |= {name: 0 for name in COUNTS if given[name] is None}
    for name, count in given.items():
        if not is_count(count, 0) and not (count is None and name in BOUNDS):
            raise InvalidInputError(f"{name} must be an integer of at least 0, got {shown(count)}")
    return {name: count if count is None else int(count) for name, count in given.items()}


def decoder_side(meta) -> dict:
    """The fields about the decoder's tokens; `{}` if there are none, only encoders."""
    device = _device(meta.slot_mapping, meta.block_tables)
    listed, seq_lens = both_forms("seq_lens", meta.seq_lens, meta.seq_lens_tensor, device)
    if seq_lens is None:
        return {}
    _check_rows("block_tables", meta.block_tables, len(seq_lens))
    starts = meta.query_start_loc
    starts = (
        _query_starts(meta, seq_lens) if starts is None else _padded_starts(meta, len(seq_lens))
    )
    _check_tokens(meta, starts, len(seq_lens))
    _check_of_prefills(meta, starts, seq_lens)
    new_lens = tensor("query_start_loc", starts.diff(), seq_lens.device)
    context_lens = seq_lens - new_lens.to(seq_lens.dtype)
    return {
        "seq_lens": listed,
        "seq_lens_tensor": seq_lens,
        "query_start_loc": starts,
        "context_lens_tensor": agreed(
            "context_lens",
            cut_contexts(meta, _padded_contexts(meta, context_lens), context_lens),
            context_lens,
        ),
        "seq_start_loc": agreed("seq_start_loc", meta.seq_start_loc, start_locs(seq_lens)),
        **_bounds(meta, listed, span_lengths(starts)),
        "is_prompt": _is_prompt(meta),
    }


def encoder_side(meta) -> dict:
    """The fields about encoder tokens; `{}` if there are none."""
    device = _device(meta.cross_slot_mapping, meta.slot_mapping)
    given = meta.encoder_seq_lens, meta.encoder_seq_lens_tensor
    listed, lens = both_forms("encoder_seq_lens", *given, device)
    if lens is None:
        return {}
    _check_rows("cross_block_tables", meta.cross_block_tables, len(lens))
    starts = start_locs(lens)
    count = _num_encoder_tokens(meta, listed)
    new = meta.encoder_query_start_loc
    if new is None:
        new = starts if count is None else starts.clamp(max=count)
    new = nondecreasing_starts(new)
    _check_encoder_tokens(listed, span_lengths(new))
    return {
        "encoder_seq_lens": listed,
        "encoder_seq_lens_tensor": lens,
        "encoder_seq_start_loc": agreed(
            "encoder_seq_start_loc", meta.encoder_seq_start_loc, starts
        ),
        "encoder_query_start_loc": new,
        "max_encoder_seq_len": bound("max_encoder_seq_len", meta.max_encoder_seq_len, listed),
        "num_encoder_tokens": count,
    }


def _num_encoder_tokens(meta, lens):
    if meta.num_encoder_tokens is not None:
        return meta.num_encoder_tokens
    if meta.cross_slot_mapping is not None:
        return len(meta.cross_slot_mapping)
    return None if lens is None else sum(lens)


def _query_starts(meta, seq_lens):
    _check_prefills(meta, len(seq_lens))
    decodes = len(seq_lens) - meta.num_prefills
    if decodes != meta.num_decode_tokens:
        raise InvalidInputError(
            f"without query_start_loc a decode brings one token, so {len(seq_lens)} sequences with "
            f"{meta.num_prefills} prefills make {decodes} decode tokens, got "
            f"{meta.num_decode_tokens}"
        )
    query_lens = torch.ones_like(seq_lens)
    prefills = slice(meta.num_prefills)
    query_lens[prefills] = seq_lens[prefills]
    if meta.context_lens_tensor is not None:
        query_lens[prefills] -= meta.context_lens_tensor[prefills].to(seq_lens)
    return start_locs(query_lens)


def _padded_starts(meta, num_seqs):
    """The given starts, with those that are missing for a captured graph's padding sequences.

    Zeros behind the last sequence are padding, too.
    """
    starts = nondecreasing_starts(meta.query_start_loc)
    missing = num_seqs + 1 - len(starts)
    if not meta.use_cuda_graph or missing <= 0 or not len(starts):
        return starts
    return torch.cat([starts, starts[-1:].expand(missing)])


def _padded_contexts(meta, derived):
    contexts = meta.context_lens_tensor
    if contexts is None or not meta.use_cuda_graph:
        return contexts
    return torch.cat([contexts, derived[len(contexts) :].to(contexts)])


def _check_prefills(meta, num_seqs):
    if not 0 <= meta.num_prefills <= num_seqs:
        raise InvalidInputError(
            f"num_prefills must be from 0 to the {num_seqs} of seq_lens, got {meta.num_prefills}"
        )


def _check_rows(name, tables, num_seqs):
    if tables is not None and tables.numel() and not len(tables) <= num_seqs:
        raise InvalidInputError(
            f"{name} must have a row for each of the {num_seqs} sequences, got "
            f"{0 if tables is None else len(tables)}"
        )


def _check_of_prefills(meta, starts, seq_lens):
    """Requires starts that are given of prefills alone to be those of all."""
    count = meta.num_prefills
    if meta.kv_start_loc is not None:
        agreed("kv_start_loc", meta.kv_start_loc, start_locs(seq_lens[:count]))
    if meta.seqlen_q is not None:
        agreed("seqlen_q", meta.seqlen_q, starts[: count + 1])


def _check_tokens(meta, starts, num_seqs):
    _check_prefills(meta, num_seqs)
    if len(starts) != num_seqs + 1:
        raise InvalidInputError(
            f"query_start_loc must have {num_seqs + 1} entries for {num_seqs} seq_lens, got "
            f"{len(starts)}"
        )
    values = known(starts)
    if values is not None:
        prefill, every = int(values[meta.num_prefills]), int(values[-1])
        got = meta.num_prefill_tokens, meta.num_decode_tokens
        decodes = min(got[1], every - prefill) if meta.use_cuda_graph else got[1]
        if (got[0], decodes) != (prefill, every - prefill):
            raise InvalidInputError(
                f"the lengths make {prefill} prefill and {every - prefill} decode tokens, got "
                f"num_prefill_tokens, num_decode_tokens = {got}"
            )
    tokens = meta.num_prefill_tokens + meta.num_decode_tokens
    if meta.slot_mapping is not None and not len(meta.slot_mapping) >= tokens:
        raise InvalidInputError(
            f"slot_mapping must have a slot (or -1) for each of the {tokens} tokens, got "
            f"{0 if meta.slot_mapping is None else len(meta.slot_mapping)}"
        )


def _check_encoder_tokens(lens, new_lens):
    if (
        lens is not None
        and new_lens is not None
        and not (
            len(new_lens) == len(lens)
            and all(new in (0, length) for new, length in zip(new_lens, lens, strict=True))
        )
    ):
        raise InvalidInputError(
            f"an encoder sequence comes whole or not at all: of lengths {lens}, this step's "
            f"encoder tokens make {new_lens}"
        )


def _bounds(meta, seq_lens, query_lens):
    prefills, decodes = slice(meta.num_prefills), slice(meta.num_prefills, None)
    decode_seqs = len(meta.seq_lens_tensor if seq_lens is None else seq_lens) - meta.num_prefills
    # The bound where lengths are not read: no sequence brings more tokens than there are.
    one_each = 1 if decode_seqs == meta.num_decode_tokens else meta.num_decode_tokens
    longest = max(meta.num_prefill_tokens, one_each)
    parts = {
        "max_query_len": (query_lens, slice(None), longest),
        "max_decode_query_len": (query_lens, decodes, one_each),
        "max_prefill_seq_len": (seq_lens, prefills, None if meta.num_prefills else 0),
        "max_decode_seq_len": (seq_lens, decodes, None if decode_seqs else 0),
    }
    return {
        name: bound(name, getattr(meta, name), lens and lens[part], fallback)
        for name, (lens, part, fallback) in parts.items()
    }


def _is_prompt(meta):
    if meta.is_prompt is not None and not isinstance(meta.is_prompt, bool):
        raise InvalidInputError(
            f"is_prompt must be True, False or None, got {shown(meta.is_prompt)}"
        )
    prompt = meta.num_prefills > 0 and meta.num_decode_tokens == 0
    tokens = meta.num_prefill_tokens + meta.num_decode_tokens
    if meta.is_prompt not in (None, prompt) and tokens:
        raise InvalidInputError(
            f"is_prompt must be {prompt} with {meta.num_prefill_tokens} prefill and "
            f"{meta.num_decode_tokens} decode tokens, got {meta.is_prompt}"
        )
    return prompt if meta.is_prompt is None else bool(meta.is_prompt)


def _device(*tensors):
    return next((tensor.device for tensor in tensors if tensor is not None), None)

"""Some sequences of a step's metadata, as fields; given bounds are kept, all else is left out."""

from typing import Any

from .bias_fields import FIELDS as BIAS_FIELDS
from .lengths import on_host, span_lengths

OF_SEQUENCES = (
    "seq_lens",
    "seq_lens_tensor",
    "block_tables",
    "context_lens_tensor",
    "encoder_seq_lens",
    "encoder_seq_lens_tensor",
    "cross_block_tables",
    *sorted({*BIAS_FIELDS.values()}),
)


def prefills(meta) -> dict[str, Any]:
    """The fields of the prefills alone."""
    return {
        **_some(meta, slice(0, meta.num_prefills), slice(0, meta.num_prefill_tokens)),
        "num_prefills": meta.num_prefills,
        "num_prefill_tokens": meta.num_prefill_tokens,
        "num_decode_tokens": 0,
        "max_query_len": meta.max_query_len,
        "max_prefill_seq_len": meta.max_prefill_seq_len,
    }


def decodes(meta) -> dict[str, Any]:
    """The fields of the decodes alone, with the padding."""
    return {
        **_some(meta, slice(meta.num_prefills, None), slice(meta.num_prefill_tokens, None)),
        "num_prefills": 0,
        "num_prefill_tokens": 0,
        "num_decode_tokens": meta.num_decode_tokens,
        "max_query_len": meta.max_decode_query_len,
        "max_decode_seq_len": meta.max_decode_seq_len,
        "use_cuda_graph": meta.use_cuda_graph,
    }


def _some(meta, seqs: slice, tokens: slice) -> dict[str, Any]:
    encoder_tokens, count = _encoder_tokens(meta, seqs), meta.num_encoder_tokens
    encoder_starts = _cut_starts(meta.encoder_query_start_loc, seqs, encoder_tokens.start)
    return {
        **{name: _cut(getattr(meta, name), seqs) for name in OF_SEQUENCES},
        "slot_mapping": _cut(meta.slot_mapping, tokens),
        "query_start_loc": _cut_starts(meta.query_start_loc, seqs, tokens.start),
        "encoder_query_start_loc": encoder_starts,
        "cross_slot_mapping": _cut(meta.cross_slot_mapping, encoder_tokens),
        "num_encoder_tokens": None if count is None else len(range(count)[encoder_tokens]),
        "max_encoder_seq_len": meta.max_encoder_seq_len,
    }


def _encoder_tokens(meta, seqs: slice) -> slice:
    """The encoder tokens of this step that belong to the prefills, or else to the decodes."""
    mixed = meta.num_prefills and meta.num_decode_tokens
    if meta.encoder_query_start_loc is None or not mixed:
        return slice(0, None)
    new = on_host("encoder_seq_lens", span_lengths(meta.encoder_query_start_loc))
    middle = sum(new[: meta.num_prefills])
    return slice(0, middle) if seqs.start == 0 else slice(middle, None)


def _cut(rows, part: slice):
    return None if rows is None else rows[part]


def _cut_starts(starts, seqs: slice, first_token: int):
    if starts is None:
        return None
    stop = None if seqs.stop is None else seqs.stop + 1
    return starts[seqs.start : stop] - first_token

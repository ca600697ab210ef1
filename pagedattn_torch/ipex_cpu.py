"""The extension's operators on a CPU, and what must be kept from them there.

One query a sequence: `single_query_cached_kv_attention` reads the cache in place. The operator
wants heads before slots, but honours strides, so it gets a view of the cache as it is.
Longer queries: `flash_attn_varlen_func` silently misreads pages that are not contiguous for a head.
It gets a copy of the keys that this call sees: under 1 % of its time, and pages of 128 tokens,
whatever the cache has, make it up to 4 times faster than pages of 16.

Both only ever see keys that some query of the sequence sees, so that neither a window's edge nor
what lies behind it can do harm.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .device_bias import slopes_on
from .ipex_ops import paged_operators

PARTITION = 128  # keys; single_query writes past its buffers unless a block divides it
PAGE = 128  # tokens of a copied page: the fastest of 16 to 512 for flash_attn_varlen_func


def unsupported(cache, batch, spec) -> list[str]:
    if batch.max_query_len <= 1:
        return []
    reasons = []
    if lacks_alibi(cache, batch, spec):
        reasons.append("alibi_slopes: ipex has none on a CPU for more than one query a sequence")
    if spec.sliding_window == 1:
        reasons.append(
            "sliding_window=1: ipex takes it for unlimited with more than one query a sequence"
        )
    return reasons


def lacks_alibi(cache, batch, spec) -> bool:
    return spec.alibi_slopes is not None and batch.max_query_len > 1


def attend(query: Tensor, cache, batch, spec, out: Tensor) -> None:
    """Writes the rows of out that belong to a sequence; NaN where a query sees no key."""
    spans = _spans(batch, spec, len(query))
    live = (spans.query_lens > 0) & (spans.key_lens > 0)
    short, long = (spans.of(live & kind) for kind in (spans.query_lens == 1, spans.query_lens > 1))
    if len(short.seqs):
        _decode(query, _readable(cache, batch, spec, short), spec, short, out)
    if len(long.seqs):
        _prefill(query, _copied(cache, batch, long), spec, long, out)


@dataclass(frozen=True)
class Spans:
    """The queries of some sequences, and the keys they see, `key_lens` from `first` on."""

    seqs: Tensor
    starts: Tensor
    query_lens: Tensor
    first: Tensor
    key_lens: Tensor

    def of(self, chosen: Tensor) -> "Spans":
        return Spans(**{name: part[chosen] for name, part in vars(self).items()})


class Pages(NamedTuple):
    """Keys and values `[pages, kv_heads, page_size, head_dim]`, and the pages of each sequence."""

    key: Tensor
    value: Tensor
    tables: Tensor


def _spans(batch, spec, num_tokens) -> Spans:
    """Of all sequences. Inside jit lengths may be anything, and must not lead out of arrays."""
    starts = batch.query_start_loc.clamp(0, num_tokens)
    query_lens = starts.diff().clamp(min=0)
    seq_lens = batch.seq_lens.clamp(0, batch.max_blocks * batch.block_size)
    first = torch.zeros_like(seq_lens)
    if spec.sliding_window is not None:
        first = (seq_lens - query_lens - spec.sliding_window + 1).clamp(min=0)
    return Spans(torch.arange(batch.num_seqs), starts[:-1], query_lens, first, seq_lens - first)


def _decode(query, pages: Pages, spec, spans: Spans, out) -> None:
    # An empty sequence in front: four that begin with the same block would be taken for beams of
    # one prompt, by a kernel that always raises.
    rows = query[pad(spans.starts, (1, 0))]
    result = torch.empty_like(rows)
    slopes = spec.alibi_slopes
    paged_operators().single_query_cached_kv_attention(
        output=result,
        query=rows,
        key_cache=pages.key,
        value_cache=pages.value,
        head_mapping=torch.empty(0, dtype=torch.int32),  # ignored
        scale=spec.scale_for(query.shape[2]),
        block_tables=pad(pages.tables, (0, 0, 1, 0), value=-1),
        context_lens=pad(spans.key_lens, (1, 0)),
        block_size=pages.key.shape[2],
        max_context_len=int(spans.key_lens.max()),
        alibi_slopes=None if slopes is None else slopes_on(slopes, query.device),
        softcap=spec.logits_soft_cap or -1.0,  # 0 would mean equal weights
    )
    out[spans.starts] = result[1:]


def _prefill(query, pages: Pages, spec, spans: Spans, out) -> None:
    tokens = _ranges(spans.starts, spans.query_lens)
    rows = query[tokens]
    result = torch.empty_like(rows)
    reach = -1 if spec.sliding_window is None else spec.sliding_window - 1
    paged_operators().flash_attn_varlen_func(
        output=result,
        query=rows,
        key_cache=pages.key,
        value_cache=pages.value,
        cu_seqlens_q=_starts(spans.query_lens),
        cu_seqlens_kv=_starts(spans.key_lens),
        max_seqlen_q=int(spans.query_lens.max()),
        # A reach of this or more is taken for none, though a query before all keys may need it.
        max_seqlen_kv=max(int(spans.key_lens.max()), reach + 1),
        scale=spec.scale_for(query.shape[2]),
        is_cusal=spec.causal,
        block_tables=pages.tables,
        alibi_slopes=None,
        window_size_left=reach,
        window_size_right=reach,
        softcap=spec.logits_soft_cap or -1.0,
    )
    out[tokens] = result


def _readable(cache, batch, spec, spans: Spans) -> Pages:
    """The cache as it is, where single_query can read it.

    A window begins anywhere in a block: as blocks of one token, the keys in it need no window,
    with which the operator returns 0 for very negative logits and takes no soft-cap.
    """
    unit = 1 if spec.sliding_window is not None else math.gcd(cache.block_size, PARTITION)
    strides = cache.key.stride()
    evenly = unit == cache.block_size or strides[0] == cache.block_size * strides[1]
    # The operator takes the strides of the keys for those of the values.
    if not evenly or strides != cache.value.stride() or strides[3] != 1:
        return _copied(cache, batch, spans)
    shape = (-1, unit, *cache.key.shape[2:])
    key, value = (plane.view(shape).transpose(1, 2) for plane in (cache.key, cache.value))
    numbers = torch.arange(-(-int(spans.key_lens.max()) // unit), dtype=torch.int32)
    positions = spans.first[:, None] + numbers * unit
    return Pages(key, value, _slots(cache, batch, spans.seqs[:, None], positions) // unit)


def _copied(cache, batch, spans: Spans) -> Pages:
    """The keys of the spans, and no others, in pages of their own."""
    counts = (spans.key_lens + PAGE - 1) // PAGE
    owners = torch.repeat_interleave(counts)[:, None]
    offsets = _ranges(torch.zeros_like(counts), counts)[:, None] * PAGE
    offsets = offsets + torch.arange(PAGE, dtype=torch.int32)
    positions = spans.first[owners] + offsets.minimum(spans.key_lens[owners] - 1)
    slots = _slots(cache, batch, spans.seqs[owners], positions)
    at = slots // cache.block_size, slots % cache.block_size
    key, value = (plane[at].transpose(1, 2).contiguous() for plane in (cache.key, cache.value))
    numbers = torch.arange(int(counts.max()), dtype=torch.int32)
    return Pages(key, value, _starts(counts)[:-1, None] + numbers)


def _slots(cache, batch, seqs: Tensor, positions: Tensor) -> Tensor:
    """The slots of some positions; what lies outside the table or the cache is moved inside."""
    positions = positions.clamp(max=batch.max_blocks * batch.block_size - 1)
    blocks = batch.block_tables[seqs, positions // batch.block_size].clamp(0, cache.num_blocks - 1)
    return blocks * cache.block_size + positions % batch.block_size


def _starts(lens: Tensor) -> Tensor:
    return pad(lens.cumsum(0, dtype=torch.int32), (1, 0))


def _ranges(begins: Tensor, lens: Tensor) -> Tensor:
    """`begins[i], begins[i] + 1, ...` of each length, one after the other."""
    offsets = torch.arange(int(lens.sum()), dtype=torch.int32)
    return torch.repeat_interleave(begins - _starts(lens)[:-1], lens) + offsets

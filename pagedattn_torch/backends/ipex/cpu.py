"""The extension's operators on a CPU, and the ways around their bugs.

- One query a sequence: `single_query_cached_kv_attention` reads the cache in place. It wants heads
  before slots, but honours strides, so it gets a view of the cache as it is.
- Longer queries: `flash_attn_varlen_func` silently misreads pages in which the keys of one head are
  not contiguous. So it gets a copy of the keys that the call sees, which takes under 1 % of its
  time; and the copy's pages of 128 tokens make it up to 4 times faster than pages of 16.

Both get only keys that some query of the sequence sees, so that NaN behind a window never reaches
them, and their handling of a window's edge matters less.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pagedattn._arrays.namespace import arange, cdiv
from pagedattn.masks import key_range

from ..bias import slopes_on
from .operators import paged_operators

PARTITION = 128  # keys; single_query writes past its buffers unless block_size divides this
PAGE = 128  # tokens of a copied page: the fastest of 16 to 512 for flash_attn_varlen_func


def refusals(call) -> list[str]:
    if call.longest_query <= 1:
        return []
    reasons = []
    if lacks_alibi(call):
        reasons.append("alibi_slopes: ipex has none on a CPU for more than one query a sequence")
    if call.spec.sliding_window == 1:
        reasons.append(
            "sliding_window=1: ipex takes it for unlimited with more than one query a sequence"
        )
    return reasons


def slower_because(call) -> list[str]:
    return []


def lacks_alibi(call) -> bool:
    return call.spec.alibi_slopes is not None and call.longest_query > 1


def attend(call, query: Tensor, cache, batch, out: Tensor) -> None:
    """Writes the rows of out that belong to a sequence; NaN where a query sees no key."""
    spans = _spans(call, batch)
    live = (spans.query_lens > 0) & (spans.key_lens > 0)
    short, long = (spans.of(live & kind) for kind in (spans.query_lens == 1, spans.query_lens > 1))
    if len(short.seqs):
        _decode(call, query, _readable(call, cache, batch, short), short, out)
    if len(long.seqs):
        _prefill(call, query, _copied(call, cache, batch, long), long, out)


@dataclass(frozen=True)
class Spans:
    """Some sequences: their queries, and the keys they see, `key_lens` of them from `first` on."""

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


def _spans(call, batch) -> Spans:
    """The spans of all sequences, clamped: inside jit nobody has checked the lengths."""
    starts = batch.query_start_loc.clamp(0, call.num_tokens)
    query_lens = starts.diff().clamp(min=0)
    seq_lens = batch.seq_lens.clamp(0, call.capacity)
    contexts = seq_lens - query_lens
    first, _ = key_range(contexts, contexts, seq_lens, False, call.window)
    return Spans(
        torch.arange(call.num_seqs, device=starts.device),
        starts[:-1],
        query_lens,
        first,
        seq_lens - first,
    )


def _decode(call, query, pages: Pages, spans: Spans, out) -> None:
    # An empty sequence goes in front. Without it, four sequences that share their first block count
    # as beams of one prompt, and the operator starts a kernel for these that always raises.
    rows = query[pad(spans.starts, (1, 0))]
    result = torch.empty_like(rows)
    slopes = call.spec.alibi_slopes
    paged_operators().single_query_cached_kv_attention(
        output=result,
        query=rows,
        key_cache=pages.key,
        value_cache=pages.value,
        head_mapping=query.new_empty(0, dtype=torch.int32),  # ignored
        scale=call.scale,
        block_tables=pad(pages.tables, (0, 0, 1, 0), value=-1),
        context_lens=pad(spans.key_lens, (1, 0)),
        block_size=pages.key.shape[2],
        max_context_len=int(spans.key_lens.max()),
        alibi_slopes=None if slopes is None else slopes_on(slopes, query.device),
        softcap=call.spec.logits_soft_cap or -1.0,  # off; 0 would give all keys the same weight
    )
    out[spans.starts] = result[1:]


def _prefill(call, query, pages: Pages, spans: Spans, out) -> None:
    tokens = _ranges(spans.starts, spans.query_lens)
    rows = query[tokens]
    result = torch.empty_like(rows)
    reach = -1 if call.window is None else call.window - 1
    paged_operators().flash_attn_varlen_func(
        output=result,
        query=rows,
        key_cache=pages.key,
        value_cache=pages.value,
        cu_seqlens_q=_starts(spans.query_lens),
        cu_seqlens_kv=_starts(spans.key_lens),
        max_seqlen_q=int(spans.query_lens.max()),
        # A window that reaches this far is dropped, but a query before all keys may need it.
        max_seqlen_kv=max(int(spans.key_lens.max()), reach + 1),
        scale=call.scale,
        is_cusal=call.spec.causal,
        block_tables=pages.tables,
        alibi_slopes=None,
        window_size_left=reach,
        window_size_right=reach,
        softcap=call.spec.logits_soft_cap or -1.0,
    )
    out[tokens] = result


def _readable(call, cache, batch, spans: Spans) -> Pages:
    """The cache in place, where single_query can read it so; a copy elsewhere.

    With a window the cache is seen as blocks of one token, so that the keys can begin anywhere in a
    block and the operator need not know of the window: if told, it returns 0 for very negative
    logits, and ignores the soft-cap.
    """
    unit = 1 if call.window is not None else math.gcd(call.block_size, PARTITION)
    strides = call.strides.key
    evenly = unit == call.block_size or strides[0] == call.block_size * strides[1]
    # The operator reads the values with the strides of the keys.
    if not evenly or strides != call.strides.value or strides[3] != 1:
        return _copied(call, cache, batch, spans)
    shape = (-1, unit, *cache.key.shape[2:])
    key, value = (plane.view(shape).transpose(1, 2) for plane in cache.planes)
    numbers = arange(cdiv(int(spans.key_lens.max()), unit), spans.key_lens)
    positions = spans.first[:, None] + numbers * unit
    return Pages(key, value, _slots(call, batch, spans.seqs[:, None], positions) // unit)


def _copied(call, cache, batch, spans: Spans) -> Pages:
    """A copy of the keys and values of the spans, and of no others, in pages of `PAGE` tokens."""
    counts = cdiv(spans.key_lens, PAGE)
    owners = torch.repeat_interleave(counts)[:, None]
    offsets = _ranges(torch.zeros_like(counts), counts)[:, None] * PAGE
    offsets = offsets + arange(PAGE, counts)
    positions = spans.first[owners] + offsets.minimum(spans.key_lens[owners] - 1)
    slots = _slots(call, batch, spans.seqs[owners], positions)
    at = slots // call.block_size, slots % call.block_size
    key, value = (plane[at].transpose(1, 2).contiguous() for plane in cache.planes)
    numbers = arange(int(counts.max()), counts)
    return Pages(key, value, _starts(counts)[:-1, None] + numbers)


def _slots(call, batch, seqs: Tensor, positions: Tensor) -> Tensor:
    """The slots of positions, clamped to the table and the cache."""
    positions = positions.clamp(max=call.capacity - 1)
    blocks = batch.block_tables[seqs, positions // call.block_size].clamp(0, call.num_blocks - 1)
    return blocks * call.block_size + positions % call.block_size


def _starts(lens: Tensor) -> Tensor:
    return pad(lens.cumsum(0, dtype=torch.int32), (1, 0))


def _ranges(begins: Tensor, lens: Tensor) -> Tensor:
    """The ranges `begins[i], begins[i] + 1, ...` of `lens[i]` numbers, one after the other."""
    offsets = arange(int(lens.sum()), lens)
    return torch.repeat_interleave(begins - _starts(lens)[:-1], lens) + offsets

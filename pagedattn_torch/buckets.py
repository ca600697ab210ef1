"""Sequences of like lengths: which of their keys to gather, and who sees them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pagedattn import AttentionSpec, BatchMetadata


class Span(NamedTuple):
    """Keys from `first` to before `last`."""

    first: int
    last: int

    def within(self, other: "Span") -> bool:
        return other.first <= self.first and self.last <= other.last


class Rows(NamedTuple):
    """Some sequences. Their keys are counted from the first block that any query sees."""

    tables: Tensor
    first_blocks: Tensor
    starts: Tensor  # of the queries
    query_lens: Tensor
    contexts: Tensor  # keys before the first query
    num_keys: Tensor

    def take(self, which) -> "Rows":
        return Rows(*(part[which] for part in self))


class Bounds(NamedTuple):
    """Between what the lengths of some sequences lie."""

    min_context: int
    max_context: int
    min_keys: int


@dataclass(frozen=True)
class Bucket:
    """Sequences that are computed as one rectangle of queries and keys.

    `bounds` is None where lengths lie on a device that must not be waited for.
    """

    rows: Rows
    spec: AttentionSpec
    block_size: int
    num_queries: int
    num_blocks: int
    blocks_at_once: int
    bounds: Bounds | None

    @property
    def size(self) -> int:
        return self.rows.num_keys.shape[0]

    def spans(self) -> Iterator[Span]:
        """All keys, in the parts that are gathered at a time."""
        for first in range(0, self.num_blocks, self.blocks_at_once):
            last = min(first + self.blocks_at_once, self.num_blocks)
            yield Span(first * self.block_size, last * self.block_size)

    def present(self) -> Span:
        """Keys that every sequence has and shows its first query, as far as is known."""
        if self.bounds is None:
            return Span(0, 0)
        window = self.spec.sliding_window
        first = 0 if window is None else self.bounds.max_context + 1 - window
        return Span(first, self.bounds.min_keys)

    def seen_by_all(self, begin: int, end: int) -> Span:
        """Keys that queries `begin` to `end` of every sequence see, as far as is known."""
        if self.bounds is None:
            return Span(0, 0)
        first, last = self.present()
        window = self.spec.sliding_window
        if window is not None:
            first += end - 1
        reach = 1 if self.spec.causal else window
        if reach is not None:
            last = min(last, self.bounds.min_context + begin + reach)
        return Span(first, last)

    def seen_by_any(self, begin: int, end: int, span: Span) -> Span:
        """The part of a span outside which queries `begin` to `end` of no sequence see a key."""
        first, last = span
        if self.bounds is not None and self.spec.causal:
            last = min(last, self.bounds.max_context + end)
        if self.bounds is not None and self.spec.sliding_window is not None:
            first = max(first, self.bounds.min_context + begin - self.spec.sliding_window + 1)
        return Span(first, last)

    def tokens(self, num_tokens: int) -> Tensor:
        """The token of each query, `[size, num_queries]`; `num_tokens` where there is none."""
        offsets = torch.arange(self.num_queries, device=self.rows.starts.device)
        tokens = self.rows.starts[:, None] + offsets
        live = offsets < self.rows.query_lens[:, None]
        live &= (tokens >= 0) & (tokens < num_tokens)
        return torch.where(live, tokens, num_tokens)

    def blocks(self, span: Span) -> Tensor:
        """What the tables say of a span, `[size, blocks]`."""
        first, last = (key // self.block_size for key in span)
        if self.spec.sliding_window is None:
            return self.rows.tables[:, first:last]
        columns = torch.arange(first, last, device=self.rows.tables.device)
        columns = self.rows.first_blocks[:, None] + columns
        return self.rows.tables.gather(1, columns.clamp(max=self.rows.tables.shape[1] - 1).long())

    def presence(self, span: Span) -> Tensor:
        """Which keys of a span each sequence has and shows its first query: `[size, keys]`."""
        keys = torch.arange(*span, device=self.rows.num_keys.device)
        present = keys < self.rows.num_keys[:, None]
        if self.spec.sliding_window is not None:
            present &= keys > self.rows.contexts[:, None] - self.spec.sliding_window
        return present

    def positions(self, begin: int, end: int, span: Span) -> tuple[Tensor, Tensor]:
        """Of queries `[size, queries]`, and of keys `[1, keys]`."""
        offsets = torch.arange(begin, end, device=self.rows.contexts.device)
        keys = torch.arange(*span, device=self.rows.contexts.device)
        return self.rows.contexts[:, None] + offsets, keys[None]


def first_blocks(batch: BatchMetadata, spec: AttentionSpec) -> Tensor:
    """The first block of each sequence that any of its queries sees: `[num_seqs]`."""
    if spec.sliding_window is None:
        return torch.zeros_like(batch.seq_lens)
    first_key = (batch.context_lens - spec.sliding_window + 1).clamp(min=0)
    return first_key // batch.block_size

"""Sequences of like lengths, computed as one rectangle of queries and keys."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from pagedattn.call import Call
from pagedattn.visibility import common_key_range, key_range


class Span(NamedTuple):
    """Keys from `first` to before `last`."""

    first: int
    last: int

    def within(self, other: "Span") -> bool:
        return other.first <= self.first and self.last <= other.last


class Rows(NamedTuple):
    """Some sequences. Their keys are counted from the first block that any query sees."""

    tables: Int[Tensor, "size max_blocks"]
    first_blocks: Int[Tensor, "size"]
    starts: Int[Tensor, "size"]  # of the queries
    query_lens: Int[Tensor, "size"]
    contexts: Int[Tensor, "size"]  # keys before the first query
    num_keys: Int[Tensor, "size"]

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

    call: Call
    rows: Rows
    num_queries: int
    num_blocks: int
    blocks_at_once: int
    bounds: Bounds | None

    @property
    def size(self) -> int:
        return self.rows.num_keys.shape[0]

    @property
    def device(self) -> torch.device:
        return self.rows.num_keys.device

    def spans(self) -> Iterator[Span]:
        """All keys, in the parts that are gathered at a time."""
        block_size = self.call.block_size
        for first in range(0, self.num_blocks, self.blocks_at_once):
            last = min(first + self.blocks_at_once, self.num_blocks)
            yield Span(first * block_size, last * block_size)

    def present(self) -> Span:
        """Keys that every sequence has and shows its first query, as far as is known."""
        if self.bounds is None:
            return Span(0, 0)
        first = self.bounds.max_context
        keys = common_key_range(first, first, self.bounds.min_keys, False, self.call.window)
        return Span(int(keys[0]), self.bounds.min_keys)

    def seen_by_all(self, begin: int, end: int) -> Span:
        """Keys that queries `begin` to `end` of every sequence see, as far as is known."""
        if self.bounds is None:
            return Span(0, 0)
        lowest, highest = self.bounds.min_context + begin, self.bounds.max_context + end - 1
        num_keys, causal = self.bounds.min_keys, self.call.spec.causal
        keys = common_key_range(lowest, highest, num_keys, causal, self.call.window)
        return Span(*map(int, keys))

    def seen_by_any(self, begin: int, end: int, span: Span) -> Span:
        """The part of a span outside which queries `begin` to `end` of no sequence see a key."""
        if self.bounds is None:
            return span
        lowest, highest = self.bounds.min_context + begin, self.bounds.max_context + end - 1
        causal, window = self.call.spec.causal, self.call.window
        first, last = key_range(lowest, highest, span.last, causal, window)
        return Span(max(int(first), span.first), int(last))

    def tokens(self) -> Int[Tensor, "{self.size} {self.num_queries}"]:
        """The token of each query; `num_tokens` where there is none."""
        offsets = torch.arange(self.num_queries, device=self.device)
        tokens = self.rows.starts[:, None] + offsets
        live = offsets < self.rows.query_lens[:, None]
        live &= (tokens >= 0) & (tokens < self.call.num_tokens)
        return torch.where(live, tokens, self.call.num_tokens)

    def blocks(self, span: Span) -> Int[Tensor, "size_times_blocks"]:
        """The blocks of a span: those of the cache, whatever the tables say."""
        first, last = (key // self.call.block_size for key in span)
        tables = self.rows.tables[:, first:last]
        if self.call.window is not None:
            columns = torch.arange(first, last, device=self.device)
            columns = self.rows.first_blocks[:, None] + columns
            tables = self.rows.tables.gather(1, columns.clamp(max=self.call.max_blocks - 1).long())
        return tables.clamp(0, self.call.num_blocks - 1).flatten()

    def presence(self, span: Span) -> Bool[Tensor, "{self.size} keys"]:
        """Which keys of a span each sequence has and shows its first query."""
        keys = torch.arange(*span, device=self.device)
        present = keys < self.rows.num_keys[:, None]
        if self.call.window is not None:
            present &= keys > self.rows.contexts[:, None] - self.call.window
        return present

    def positions(
        self, begin: int, end: int, span: Span
    ) -> tuple[Int[Tensor, "{self.size} {end}-{begin}"], Int[Tensor, "1 keys"]]:
        """Of queries, and of keys."""
        offsets = torch.arange(begin, end, device=self.device)
        keys = torch.arange(*span, device=self.device)
        return self.rows.contexts[:, None] + offsets, keys[None]

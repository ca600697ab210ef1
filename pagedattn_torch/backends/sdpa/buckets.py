"""Sequences of like lengths, computed as one rectangle of queries and keys."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from pagedattn._dispatch.call import Call
from pagedattn.batch.draft_tree import DraftTree, key_positions
from pagedattn.masks import common_key_range, descent_mask, key_range


class Span(NamedTuple):
    """The keys from number `first` up to, but not including, `last`."""

    first: int
    last: int

    def within(self, other: "Span") -> bool:
        return other.first <= self.first and self.last <= other.last


class Rows(NamedTuple):
    """Some sequences, one entry each. Keys are counted from the first block that any query sees.

    Fields:
      tables: the rows of the block tables.
      first_blocks: the column of that first block.
      starts: the first token of each sequence's queries in the packed batch.
      query_lens: the number of its queries.
      contexts: keys before its first query.
      num_keys: all its keys.
      tree: of all tokens of the batch, where they are of draft trees.
    """

    tables: Int[Tensor, "size max_blocks"]
    first_blocks: Int[Tensor, "size"]
    starts: Int[Tensor, "size"]
    query_lens: Int[Tensor, "size"]
    contexts: Int[Tensor, "size"]
    num_keys: Int[Tensor, "size"]
    tree: DraftTree[Tensor] | None

    def of(self, seqs: list[int]) -> "Rows":
        """These sequences, on a CPU."""
        if seqs == [*range(len(self.num_keys))]:
            return self
        which = torch.tensor(seqs, dtype=torch.long, device="cpu")
        return self._at(which)

    def between(self, first: int, last: int) -> "Rows":
        """The sequences from `first` up to, but not including, `last`."""
        if last - first == len(self.num_keys):
            return self
        return self._at(slice(first, last))

    def _at(self, which) -> "Rows":
        *parts, tree = self
        return Rows._make([*(part[which] for part in parts), tree])


class Bounds(NamedTuple):
    """The least and greatest context, and the fewest keys, among some sequences."""

    min_context: int
    max_context: int
    min_keys: int


@dataclass(frozen=True)
class Bucket:
    """Sequences that are computed as one rectangle of queries and keys.

    `bounds` is None if the lengths lie on a GPU, since reading them would wait for it.
    """

    call: Call
    rows: Rows
    num_queries: int
    num_blocks: int
    blocks_at_once: int
    bounds: Bounds | None

    @functools.cached_property
    def size(self) -> int:
        return self.rows.num_keys.shape[0]

    @functools.cached_property
    def device(self) -> torch.device:
        return self.rows.num_keys.device

    def spans(self) -> list[Span]:
        """All keys, in parts of `blocks_at_once` blocks."""
        block_size, spans = self.call.block_size, []
        for first in range(0, self.num_blocks, self.blocks_at_once):
            last = min(first + self.blocks_at_once, self.num_blocks)
            spans.append(Span(first * block_size, last * block_size))
        return spans

    def present(self) -> Span:
        """Keys that every sequence has, within its first query's window; none if unknown."""
        if self.bounds is None:
            return Span(0, 0)
        first = self.bounds.max_context
        keys = common_key_range(first, first, self.bounds.min_keys, False, self.call.window)
        return Span(keys[0], self.bounds.min_keys)

    def seen_by_all(self, begin: int, end: int) -> Span:
        """Keys that queries `begin` to `end` of every sequence all see; none if unknown."""
        if self.bounds is None:
            return Span(0, 0)
        lowest, highest = self.bounds.min_context + begin, self.bounds.max_context + end - 1
        if self.rows.tree is not None:
            lowest = self.bounds.min_context - 1  # beside the context, no key need be seen by all
        num_keys, causal = self.bounds.min_keys, self.call.spec.causal
        return Span(*common_key_range(lowest, highest, num_keys, causal, self.call.window))

    def seen_by_any(self, begin: int, end: int, span: Span) -> Span:
        """The part of a span of which queries `begin` to `end` of any sequence may see keys."""
        if self.bounds is None:
            return span
        lowest, highest = self.bounds.min_context + begin, self.bounds.max_context + end - 1
        if self.rows.tree is not None:
            lowest = self.bounds.min_context
        causal, window = self.call.spec.causal, self.call.window
        first, last = key_range(lowest, highest, span.last, causal, window)
        return Span(max(first, span.first), last)

    def tokens(self) -> Int[Tensor, "{self.size} {self.num_queries}"]:
        """The token of each query, `[size, num_queries]`; `num_tokens` where a row is padding."""
        offsets = torch.arange(self.num_queries, device=self.device)
        tokens = self.rows.starts[:, None] + offsets
        live = offsets < self.rows.query_lens[:, None]
        live &= (tokens >= 0) & (tokens < self.call.num_tokens)
        return torch.where(live, tokens, self.call.num_tokens)

    def blocks(self, span: Span) -> Int[Tensor, "size_times_blocks"]:
        """The blocks of a span, `[size * blocks]`, clamped to those of the cache."""
        first, last = span.first // self.call.block_size, span.last // self.call.block_size
        tables = self.rows.tables[:, first:last]
        if self.call.window is not None:
            columns = torch.arange(first, last, device=self.device)
            columns = self.rows.first_blocks[:, None] + columns
            tables = self.rows.tables.gather(1, columns.clamp(max=self.call.max_blocks - 1).long())
        return tables.clamp(0, self.call.num_blocks - 1).flatten()

    def presence(self, span: Span) -> Bool[Tensor, "{self.size} keys"]:
        """As `present`, exactly: which keys of a span each sequence has, `[size, keys]`."""
        keys = torch.arange(*span, device=self.device)
        present = keys < self.rows.num_keys[:, None]
        if self.call.window is not None:
            present &= keys > self.rows.contexts[:, None] - self.call.window
        return present

    def numbers(self, span: Span) -> Int[Tensor, "{self.size} keys"]:
        """The positions of the keys of a span in their sequences, `[size, keys]`."""
        keys = torch.arange(*span, device=self.device)
        return self.rows.first_blocks[:, None] * self.call.block_size + keys

    def positions(
        self, begin: int, end: int, span: Span
    ) -> tuple[Int[Tensor, "{self.size} {end}-{begin}"], Int[Tensor, "#{self.size} keys"]]:
        """The positions of queries `[size, queries]`, and of the keys of a span."""
        offsets = torch.arange(begin, end, device=self.device)
        keys = torch.arange(*span, device=self.device)[None]
        contexts, tree = self.rows.contexts, self.rows.tree
        if tree is None:
            return contexts[:, None] + offsets, keys
        depths = tree.depths[self._some_tokens(begin, end)]
        return contexts[:, None] + depths, self._standing(tree, keys)[0]

    def descent(
        self, begin: int, end: int, span: Span
    ) -> Bool[Tensor, "{self.size} {end}-{begin} keys"] | None:
        """Which keys are of the context or of a query's own line; None if no draft branches."""
        tree = self.rows.tree
        if tree is None:
            return None
        keys = torch.arange(*span, device=self.device)[None]
        ancestors = tree.ancestors[self._some_tokens(begin, end)]
        return descent_mask(ancestors, self._standing(tree, keys)[1])

    def _standing(self, tree, keys):
        return key_positions(tree.depths, self.rows.starts, self.rows.contexts, keys)

    def _some_tokens(self, begin: int, end: int) -> Int[Tensor, "{self.size} {end}-{begin}"]:
        """The tokens of queries, some token where there is none."""
        offsets = torch.arange(begin, end, device=self.device)
        return (self.rows.starts[:, None] + offsets).clamp(0, self.call.num_tokens - 1)

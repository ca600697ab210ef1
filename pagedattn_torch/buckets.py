"""Sequences of a batch grouped by length, so that a kernel for rectangles wastes little padding."""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedattn import AttentionSpec, BatchMetadata


@dataclass(frozen=True)
class Bucket:
    """Sequences that are computed as one rectangle of queries and keys.

    A sequence's keys are gathered from its first visible block on; `context` counts from there.
    What depends on lengths is None where they lie on a device that must not be waited for.
    """

    seqs: Tensor  # int64 [size]
    num_queries: int
    num_blocks: int
    contexts: list[int] | None

    @property
    def num_gathered(self) -> int:
        return len(self.seqs) * self.num_blocks

    def key_range(self, begin: int, end: int, num_keys: int, spec: AttentionSpec):
        """The gathered keys that queries `begin` to `end` of any sequence may see."""
        first, last = 0, num_keys
        if self.contexts is not None and spec.causal:
            last = min(last, max(self.contexts) + end)
        if self.contexts is not None and spec.sliding_window is not None:
            first = max(0, min(self.contexts) + begin - spec.sliding_window + 1)
        return first, max(first, last)


def first_blocks(batch: BatchMetadata, spec: AttentionSpec) -> Tensor:
    """The first block of each sequence that any of its queries sees: `[num_seqs]`."""
    if spec.sliding_window is None:
        return torch.zeros_like(batch.seq_lens)
    first_key = (batch.context_lens - spec.sliding_window + 1).clamp(min=0)
    return first_key // batch.block_size


def make_buckets(batch: BatchMetadata, spec: AttentionSpec, keys_at_once: int) -> list[Bucket]:
    """Groups sequences of like lengths, at most about `keys_at_once` padded keys a group.

    Off the CPU there is one bucket of the static bounds: reading lengths would wait for the device.
    """
    if batch.seq_lens.device.type != "cpu":
        everyone = torch.arange(batch.num_seqs, device=batch.seq_lens.device)
        return [Bucket(everyone, batch.max_query_len, batch.max_blocks, None)]
    first = first_blocks(batch, spec)
    num_blocks = (batch.seq_lens + batch.block_size - 1) // batch.block_size - first
    contexts = (batch.context_lens - first * batch.block_size).tolist()
    groups = defaultdict(list)
    lengths = zip(batch.query_lens.tolist(), num_blocks.tolist(), strict=True)
    for seq, (queries, blocks) in enumerate(lengths):
        if queries > 0 and blocks > 0:
            keys = _round_up(blocks * batch.block_size)
            groups[_round_up(queries), keys].append((seq, queries, blocks))
    return [
        _bucket(members[begin : begin + size], contexts)
        for (_, keys), members in groups.items()
        for size in [max(1, keys_at_once // keys)]
        for begin in range(0, len(members), size)
    ]


def _bucket(members, contexts) -> Bucket:
    seqs, queries, blocks = zip(*members, strict=True)
    return Bucket(torch.tensor(seqs), max(queries), max(blocks), [contexts[s] for s in seqs])


def _round_up(length: int) -> int:
    """To an eighth of its power of two: at most 12.5 % of padding, 16 short classes aside."""
    step = max(16, 1 << max(0, length.bit_length() - 4)) if length > 16 else length
    return -(-length // step) * step

"""Sequences of a batch grouped by length, so that a kernel for rectangles wastes little padding."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedattn import AttentionSpec, BatchMetadata

# A call of its own costs a CPU about as much as this many keys more.
KEYS_A_CALL = 256


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
    """Groups sequences of like lengths, of at most about `keys_at_once` padded keys a group.

    Off the CPU there is one bucket of the static bounds: reading lengths would wait for the device.
    """
    if batch.seq_lens.device.type != "cpu":
        everyone = torch.arange(batch.num_seqs, device=batch.seq_lens.device)
        return [Bucket(everyone, batch.max_query_len, batch.max_blocks, None)]
    first = first_blocks(batch, spec)
    # Inside jit lengths are whatever they are; they must not lead past the table or the tokens.
    seq_lens = batch.seq_lens.clamp(0, batch.max_blocks * batch.block_size)
    num_blocks = (seq_lens + batch.block_size - 1) // batch.block_size - first
    contexts = (batch.context_lens - first * batch.block_size).tolist()
    query_lens = batch.query_lens.clamp(0, min(batch.max_query_len, batch.num_tokens)).tolist()
    classes = map(_query_class, query_lens)
    sizes = zip(classes, num_blocks.tolist(), range(batch.num_seqs), strict=True)
    groups: list[list] = []
    for size in sorted((s for s in sizes if s[0] > 0 and s[1] > 0), reverse=True):
        if not groups or not _joins(size, groups[-1], batch.block_size, keys_at_once):
            groups.append([])
        groups[-1].append(size)
    return [_bucket(group, query_lens, contexts) for group in groups]


def _query_class(queries: int) -> int:
    """Decoding apart; else up to an eighth of the power of two, or the 16 rows that cost as one."""
    step = max(16, 1 << queries.bit_length() >> 4)
    return queries if queries <= 1 else -(-queries // step) * step


def _joins(size, group, block_size, keys_at_once) -> bool:
    """Whether to pad a sequence to the size of a group's first, which has the most keys."""
    queries, blocks, _ = group[0]
    padding = (blocks - size[1]) * block_size
    return (
        size[0] == queries
        and padding <= max(KEYS_A_CALL, blocks * block_size // 8)
        and (len(group) + 1) * blocks * block_size <= keys_at_once
    )


def _bucket(group, query_lens, contexts) -> Bucket:
    _, blocks, seqs = zip(*group, strict=True)
    queries = max(query_lens[seq] for seq in seqs)
    return Bucket(torch.tensor(seqs), queries, blocks[0], [contexts[seq] for seq in seqs])

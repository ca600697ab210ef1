"""Counts the numbers of out and lse that change with the company of a token, on a CUDA GPU."""

from typing import Any, NamedTuple

import torch

import pagedattn_torch
from benchmarks.case import HEAD_DIM, HEADS, KV_HEADS
from pagedattn import AttentionSpec, KVCache, make_batch
from pagedattn.extend import cdiv

BLOCK_SIZE = 16
# Some end within a segment or a step of keys, and some are one.
LENGTHS = 1, 77, 128, 513, 1500, 2048, 4300
SLOPES = tuple(2.0 ** (-8 * (head + 1) / HEADS) for head in range(HEADS))


class Kind(NamedTuple):
    """Calls of one kind."""

    spec: AttentionSpec = AttentionSpec()
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    unit: float = 1.0  # the deviation of what the cache holds
    kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM
    value_dim: int | None = None  # of latents
    sinks: bool = False


KINDS = {
    "plain": Kind(),
    "window": Kind(AttentionSpec(sliding_window=700)),
    "ALiBi": Kind(AttentionSpec(alibi_slopes=SLOPES)),
    "soft-cap": Kind(AttentionSpec(logits_soft_cap=20.0)),
    "sinks": Kind(sinks=True),
    "float16": Kind(dtype=torch.float16),
    "float32": Kind(dtype=torch.float32),
    "e4m3": Kind(cache_dtype=torch.float8_e4m3fn),
    "int8": Kind(AttentionSpec(scale=HEAD_DIM**-0.5 / 32), cache_dtype=torch.int8, unit=32.0),
    "latents": Kind(kv_heads=1, head_dim=576, value_dim=512),
    "head_dim 256": Kind(head_dim=256),
}


class Piece(NamedTuple):
    """The last tokens of sequences from which `stop` are cut, in one call."""

    seqs: tuple[int, ...]
    last: int
    stop: int = 0


EVERY = tuple(range(len(LENGTHS)))
ALONE = [(seq,) for seq in EVERY]
PROMPTS = Piece(EVERY, max(LENGTHS))
WAYS = {
    "decodes": [Piece(EVERY, 1)],
    "drafts of 8": [Piece(EVERY, 8)],
    "chunks of 300 that end before": [Piece(EVERY, 300, stop=55)],
}
MORE = {
    "decodes alone": [Piece(seqs, 1) for seqs in ALONE],
    "decodes, 64 of them": [Piece(EVERY * 9, 1)],
    "drafts of 8 alone": [Piece(seqs, 8) for seqs in ALONE],
    "chunks of 40": [Piece(EVERY, 40)],
    "prompts alone": [Piece(seqs, max(LENGTHS)) for seqs in ALONE],
}


class Sequences:
    """A cache of sequences of `LENGTHS`, and queries of all their tokens."""

    def __init__(self, kind: Kind) -> None:
        torch.manual_seed(0)
        counts = [cdiv(n, BLOCK_SIZE) for n in LENGTHS]
        plane = sum(counts), BLOCK_SIZE, kind.kv_heads, kind.head_dim
        self.kind, self.cache = kind, cache_of(kind, plane)
        normal: Any = {"device": "cuda", "dtype": kind.dtype}
        self.queries = [torch.randn(n, HEADS, kind.head_dim, **normal) for n in LENGTHS]
        self.tables = [ids.tolist() for ids in torch.randperm(sum(counts)).split(counts)]
        self.sinks = torch.randn(HEADS, device="cuda") if kind.sinks else None

    def results(self, piece: Piece) -> list[torch.Tensor]:
        """out and lse of each sequence's tokens."""
        lens = [max(1, LENGTHS[seq] - piece.stop) for seq in piece.seqs]
        counts = [min(piece.last, n) for n in lens]
        pieces = list(zip(piece.seqs, lens, counts, strict=True))
        query = torch.cat([self.queries[seq][n - count : n] for seq, n, count in pieces])
        tables = [self.tables[seq][: cdiv(n, BLOCK_SIZE)] for seq, n, _ in pieces]
        batch = make_batch(counts, None, tables, key_lens=lens, block_size=BLOCK_SIZE)
        options: Any = {} if self.sinks is None else {"sinks": self.sinks}
        out, lse = pagedattn_torch.paged_attention(
            query,
            self.cache,
            batch,
            self.kind.spec,
            backend="triton",
            batch_invariant=True,
            return_lse=True,
            **options,
        )
        return list(torch.cat([out.float(), lse[..., None]], -1).split(counts))


def cache_of(kind: Kind, plane: tuple[int, ...]) -> KVCache:
    def filled():
        values = (torch.randn(plane, device="cuda") * kind.unit).clamp(-127, 127)
        return values.to(kind.cache_dtype or kind.dtype)

    return KVCache(filled(), None if kind.value_dim else filled(), value_dim=kind.value_dim)


def differing(name: str) -> dict[str, int]:
    """How many numbers differ from the prompts', by the kind of call, and how many there are."""
    sequences = Sequences(KINDS[name])
    whole = sequences.results(PROMPTS)
    counts, numbers = {}, 0
    for way, pieces in (WAYS | MORE if name == "plain" else WAYS).items():
        counts[way] = 0
        for piece in pieces:
            for seq, got in zip(piece.seqs, sequences.results(piece), strict=True):
                end = max(1, LENGTHS[seq] - piece.stop)
                want = whole[seq][end - len(got) : end]
                counts[way] += int((got.view(torch.int32) != want.view(torch.int32)).sum())
                numbers += got.numel()
    return counts | {"of": numbers}

"""The shapes that gpu.py times, as tensors on the GPU."""

import itertools
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

import pagedattn_torch
from benchmarks.work import HEAD_DIM, HEADS, KV_HEADS, causal_flops
from pagedattn import BatchMetadata, KVCache
from pagedattn.extend import cdiv

# Repeated calls must read at least so much before they come back to a page, or the cache has it.
L2_BYTES = 200 << 20


@dataclass
class Case:
    """One shape: bfloat16 tensors on the GPU, with several sets of tables over one cache."""

    name: str
    query_lens: list[int]
    seq_lens: list[int]
    block_size: int = 16
    query: torch.Tensor = field(init=False, repr=False)
    cache: KVCache = field(init=False, repr=False)
    batches: list[BatchMetadata] = field(init=False, repr=False)

    @property
    def kv_bytes(self) -> int:
        return sum(self.seq_lens) * KV_HEADS * HEAD_DIM * 2 * 2

    @property
    def flops(self) -> float:
        return causal_flops(self.query_lens, self.seq_lens)

    @property
    def decode(self) -> bool:
        """Whether reading keys and values takes the time, rather than arithmetic."""
        return max(self.query_lens) <= 8

    @property
    def prefill(self) -> bool:
        """Whether all sequences are prompts without a context."""
        return self.query_lens == self.seq_lens

    @property
    def like_queries(self) -> int:
        """How many queries every sequence brings; ValueError if not all the same."""
        if len(set(self.query_lens)) > 1:
            raise ValueError("queries of different lengths need padding")
        return self.query_lens[0]

    @property
    def like_keys(self) -> bool:
        return len(set(self.seq_lens)) == 1

    @cached_property
    def expected(self) -> torch.Tensor:
        """The result with the first set of tables, by our Triton kernels."""
        batch = self.batches[0]
        attend: Any = pagedattn_torch.paged_attention
        return attend(self.query, self.cache, batch, backend="triton")

    def require(self, out: torch.Tensor) -> None:
        """ValueError if a contender's result with the first set of tables is not `expected`."""
        wrong = (out.view_as(self.expected) - self.expected).float().norm()
        wrong = (wrong / self.expected.float().norm()).item()
        if not wrong < 0.03:
            raise ValueError(f"its answer differs by {wrong:.0%}")

    def allocate(self) -> "Case":
        torch.manual_seed(0)
        sets = max(1, cdiv(L2_BYTES, self.kv_bytes))
        needed = [cdiv(n, self.block_size) for n in self.seq_lens]
        num_blocks = sets * sum(needed)
        shape = num_blocks, self.block_size, KV_HEADS, HEAD_DIM
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.query = torch.randn(sum(self.query_lens), HEADS, HEAD_DIM, **options)
        self.cache = KVCache(torch.randn(shape, **options), torch.randn(shape, **options))
        ids = torch.randperm(num_blocks).int().split(sum(needed))
        self.batches = [self._batch(part, needed) for part in ids]
        return self

    def free(self) -> None:
        del self.query, self.cache, self.batches
        self.__dict__.pop("expected", None)
        torch.cuda.empty_cache()

    def _batch(self, ids, needed) -> BatchMetadata:
        tables = torch.full((len(needed), max(needed)), -1, dtype=torch.int32)
        for row, part in zip(tables, ids.split(needed), strict=True):
            row[: len(part)] = part
        starts = [0, *itertools.accumulate(self.query_lens)]
        tokens = torch.zeros(starts[-1], dtype=torch.int32, device="cuda")
        return BatchMetadata(
            block_tables=tables.cuda(),
            seq_lens=torch.tensor(self.seq_lens, dtype=torch.int32, device="cuda"),
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device="cuda"),
            slot_mapping=tokens - 1,
            positions=tokens,
            block_size=self.block_size,
            max_query_len=max(self.query_lens),
        )


def _decodes(suffix: str, block_size: int) -> list[Case]:
    return [
        Case("decode 64x4096" + suffix, [1] * 64, [4096] * 64, block_size),
        Case("decode 8x512" + suffix, [1] * 8, [512] * 8, block_size),
        Case("decode 1x131072" + suffix, [1], [131072], block_size),
        Case("decode 256x1024" + suffix, [1] * 256, [1024] * 256, block_size),
        Case("decode skewed" + suffix, [1] * 64, [256] * 56 + [16384] * 8, block_size),
    ]


CASES = [
    *_decodes("", 16),
    Case("prefill 2x8192", [8192] * 2, [8192] * 2),
    Case("prefill 8x2048", [2048] * 8, [2048] * 8),
    Case("chunk 64x(128 on 4096)", [128] * 64, [4224] * 64),
    Case("mixed 2x4096 + 62x(1 on 4095)", [4096] * 2 + [1] * 62, [4096] * 64),
    Case("verify 64x(8 on 4096)", [8] * 64, [4096] * 64),
    *_decodes(", block 64", 64),
]
STEP = Case("decode 16x2048", [1] * 16, [2048] * 16)

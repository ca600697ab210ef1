"""What cpu.py and gpu.py time: shapes of batches, and the tensors of each on its device."""

import itertools
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

import pagedattn_torch
from benchmarks.timing import L2_BYTES
from pagedattn import BatchMetadata, KVCache, make_batch
from pagedattn.extend import cdiv

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
GROUP, SCALE = HEADS // KV_HEADS, HEAD_DIM**-0.5
HEADS_SAID = f"{HEADS} query heads, {KV_HEADS} KV heads, head_dim {HEAD_DIM}"


@dataclass(frozen=True)
class Case:
    """One shape; its tensors are made when they are first used, and freed by `free`."""

    shape: str
    query_lens: list[int]
    seq_lens: list[int]
    block_size: int = 16
    dtype_name: str = "bfloat16"
    tolerance: ClassVar[float]  # of the norm of the result

    @property
    def name(self) -> str:
        return self.shape if self.block_size == 16 else f"{self.shape}, block {self.block_size}"

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype_name)

    @property
    def kv_bytes(self) -> int:
        return sum(self.seq_lens) * KV_HEADS * HEAD_DIM * 2 * self.dtype.itemsize

    @property
    def flops(self) -> float:
        """Floating-point operations of both products of causal attention, over all heads.

        >>> Case("a decode", [1], [10]).flops / (4 * HEADS * HEAD_DIM)
        10.0
        """
        lens = zip(self.query_lens, self.seq_lens, strict=True)
        pairs = sum(q * (n - q) + q * (q + 1) / 2 for q, n in lens)
        return 4 * HEADS * HEAD_DIM * pairs

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

    @property
    def starts(self) -> list[int]:
        """Where each sequence's tokens start, and where the last one's end."""
        return [0, *itertools.accumulate(self.query_lens)]

    @property
    def counts(self) -> list[int]:
        """Each sequence's blocks."""
        return [cdiv(n, self.block_size) for n in self.seq_lens]

    @property
    def expected(self) -> torch.Tensor:
        """`[num_tokens, heads, head_dim]`."""
        raise NotImplementedError

    def require(self, out: torch.Tensor) -> None:
        """ValueError if a contender's result is not `expected`."""
        wrong = (out.reshape(self.expected.shape).float() - self.expected.float()).norm()
        wrong = (wrong / self.expected.float().norm()).item()
        if not wrong < self.tolerance:
            raise ValueError(f"its answer differs by {wrong:.1%}")

    def free(self) -> None:
        """Frees the tensors; they are made again when they are used again."""
        for name, attribute in vars(type(self)).items():
            if isinstance(attribute, cached_property):
                self.__dict__.pop(name, None)

    def as_dict(self) -> dict:
        return asdict(self)


class CpuCase(Case):
    """Tensors on the CPU. Two processes that make the same case get the same values."""

    tolerance = 0.02

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.dtype_name}, block {self.block_size}"

    @cached_property
    def query(self) -> torch.Tensor:
        """`[num_tokens, heads, head_dim]`."""
        return self._normal(0, self.starts[-1], HEADS, HEAD_DIM)

    @cached_property
    def planes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, `[num_blocks, block_size, kv_heads, head_dim]`."""
        shape = sum(self.counts), self.block_size, KV_HEADS, HEAD_DIM
        return self._normal(1, *shape), self._normal(2, *shape)

    @cached_property
    def tables(self) -> torch.Tensor:
        """int32 `[num_seqs, blocks]`: blocks in no order, and block 0 past a sequence's end."""
        ids = np.random.default_rng(3).permutation(sum(self.counts)).astype(np.int32)
        rows = torch.from_numpy(ids).split(self.counts)
        return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)

    @property
    def batch(self) -> BatchMetadata:
        contexts = [n - q for q, n in zip(self.query_lens, self.seq_lens, strict=True)]
        tables = self.tables.numpy()
        return make_batch(self.query_lens, contexts, tables, block_size=self.block_size)

    def _normal(self, seed: int, *shape: int) -> torch.Tensor:
        values = np.random.default_rng(seed).standard_normal(shape, np.float32)
        return torch.empty(shape, dtype=self.dtype).copy_(torch.from_numpy(values))  # aligned

    def dense(self, seqs: list[int]) -> list[torch.Tensor]:
        """Keys and values of sequences of one length, unpaged: `[size, kv_heads, keys, dim]`."""
        keys = self.seq_lens[seqs[0]]
        tables = self.tables[seqs, : cdiv(keys, self.block_size)].long()
        rows = (plane[tables].flatten(1, 2)[:, :keys] for plane in self.planes)
        return [row.transpose(1, 2).contiguous() for row in rows]

    def rows(self, seqs: list[int]) -> torch.Tensor:
        """Queries of sequences of one query length: `[size, queries, heads, dim]`."""
        starts = torch.tensor(self.starts)[seqs, None]
        return self.query[starts + torch.arange(self.query_lens[seqs[0]])]

    @cached_property
    def expected(self) -> torch.Tensor:
        """The formula in float32, a sequence at a time."""
        return torch.cat([self._plain(seq) for seq in range(len(self.seq_lens))])

    def _plain(self, seq) -> torch.Tensor:
        num_queries, num_keys = self.query_lens[seq], self.seq_lens[seq]
        key, value = (part[0].float() for part in self.dense([seq]))
        query = self.rows([seq])[0].float().view(num_queries, KV_HEADS, -1, HEAD_DIM)
        logits = torch.einsum("qhgd,hkd->hgqk", query, key) * SCALE
        hidden = torch.ones(num_queries, num_keys).triu(num_keys - num_queries + 1).bool()
        weights = logits.masked_fill_(hidden, -torch.inf).softmax(3)
        return torch.einsum("hgqk,hkd->qhgd", weights, value).reshape(-1, HEADS, HEAD_DIM)


class GpuCase(Case):
    """Tensors on the GPU, with several sets of tables over one cache."""

    tolerance = 0.03

    @cached_property
    def _tensors(self) -> tuple[torch.Tensor, KVCache, list[BatchMetadata]]:
        torch.manual_seed(0)
        num_blocks = max(1, cdiv(L2_BYTES, self.kv_bytes)) * sum(self.counts)
        shape = num_blocks, self.block_size, KV_HEADS, HEAD_DIM
        options: Any = {"device": "cuda", "dtype": self.dtype}
        query = torch.randn(self.starts[-1], HEADS, HEAD_DIM, **options)
        cache = KVCache(torch.randn(shape, **options), torch.randn(shape, **options))
        ids = torch.randperm(num_blocks).int().split(sum(self.counts))
        return query, cache, [self._batch(part) for part in ids]

    @property
    def query(self) -> torch.Tensor:
        return self._tensors[0]

    @property
    def cache(self) -> KVCache:
        return self._tensors[1]

    @property
    def batches(self) -> list[BatchMetadata]:
        return self._tensors[2]

    @cached_property
    def expected(self) -> torch.Tensor:
        """The result with the first set of tables, by our Triton kernels."""
        attend: Any = pagedattn_torch.paged_attention
        return attend(self.query, self.cache, self.batches[0], backend="triton")

    def free(self) -> None:
        super().free()
        torch.cuda.empty_cache()

    def _batch(self, ids) -> BatchMetadata:
        tables = torch.full((len(self.counts), max(self.counts)), -1, dtype=torch.int32)
        for row, part in zip(tables, ids.split(self.counts), strict=True):
            row[: len(part)] = part
        tokens = torch.zeros(self.starts[-1], dtype=torch.int32, device="cuda")
        return BatchMetadata(
            block_tables=tables.cuda(),
            seq_lens=torch.tensor(self.seq_lens, dtype=torch.int32, device="cuda"),
            query_start_loc=torch.tensor(self.starts, dtype=torch.int32, device="cuda"),
            slot_mapping=tokens - 1,
            positions=tokens,
            block_size=self.block_size,
            max_query_len=max(self.query_lens),
        )

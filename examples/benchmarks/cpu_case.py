"""The shapes that cpu.py times, as tensors on the CPU."""

import itertools
import math
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
import torch

from benchmarks.work import HEAD_DIM, HEADS, KV_HEADS, causal_flops

SCALE = HEAD_DIM**-0.5


@dataclass(frozen=True)
class Case:
    """One shape. Two processes that make the same case get the same values."""

    shape: str
    query_lens: list[int]
    seq_lens: list[int]
    block_size: int = 16
    dtype_name: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.dtype_name}, block {self.block_size}"

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype_name)

    @property
    def kv_bytes(self) -> int:
        return sum(self.seq_lens) * KV_HEADS * HEAD_DIM * 2 * self.dtype.itemsize

    @property
    def flops(self) -> float:
        return causal_flops(self.query_lens, self.seq_lens)

    @property
    def decode(self) -> bool:
        """Whether reading keys and values takes the time, rather than arithmetic."""
        return max(self.query_lens) == 1

    @property
    def starts(self) -> list[int]:
        """Where each sequence's tokens start, and where the last one's end."""
        return [0, *itertools.accumulate(self.query_lens)]

    @cached_property
    def query(self) -> torch.Tensor:
        """`[num_tokens, heads, head_dim]`."""
        return self._normal(0, self.starts[-1], HEADS, HEAD_DIM)

    @cached_property
    def planes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, `[num_blocks, block_size, kv_heads, head_dim]`."""
        shape = len(self._ids), self.block_size, KV_HEADS, HEAD_DIM
        return self._normal(1, *shape), self._normal(2, *shape)

    @cached_property
    def tables(self) -> torch.Tensor:
        """int32 `[num_seqs, blocks]`: blocks in no order, and block 0 past a sequence's end."""
        counts = [math.ceil(n / self.block_size) for n in self.seq_lens]
        rows = torch.from_numpy(self._ids).split(counts)
        return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)

    @cached_property
    def _ids(self) -> np.ndarray:
        num_blocks = sum(math.ceil(n / self.block_size) for n in self.seq_lens)
        return np.random.default_rng(3).permutation(num_blocks).astype(np.int32)

    def _normal(self, seed: int, *shape: int) -> torch.Tensor:
        values = np.random.default_rng(seed).standard_normal(shape, np.float32)
        return torch.empty(shape, dtype=self.dtype).copy_(torch.from_numpy(values))  # aligned

    def dense(self, seqs: list[int]) -> list[torch.Tensor]:
        """Keys and values of sequences of one length, unpaged: `[size, kv_heads, keys, dim]`."""
        keys = self.seq_lens[seqs[0]]
        tables = self.tables[seqs, : math.ceil(keys / self.block_size)].long()
        rows = (plane[tables].flatten(1, 2)[:, :keys] for plane in self.planes)
        return [row.transpose(1, 2).contiguous() for row in rows]

    def rows(self, seqs: list[int]) -> torch.Tensor:
        """Queries of sequences of one query length: `[size, queries, heads, dim]`."""
        starts = torch.tensor(self.starts)[seqs, None]
        return self.query[starts + torch.arange(self.query_lens[seqs[0]])]

    @cached_property
    def expected(self) -> torch.Tensor:
        """The formula in float32, a sequence at a time: `[num_tokens, heads, dim]`."""
        return torch.cat([self._plain(seq) for seq in range(len(self.seq_lens))])

    def _plain(self, seq) -> torch.Tensor:
        num_queries, num_keys = self.query_lens[seq], self.seq_lens[seq]
        key, value = (part[0].float() for part in self.dense([seq]))
        query = self.rows([seq])[0].float().view(num_queries, KV_HEADS, -1, HEAD_DIM)
        logits = torch.einsum("qhgd,hkd->hgqk", query, key) * SCALE
        hidden = torch.ones(num_queries, num_keys).triu(num_keys - num_queries + 1).bool()
        weights = logits.masked_fill_(hidden, -torch.inf).softmax(3)
        return torch.einsum("hgqk,hkd->qhgd", weights, value).reshape(-1, HEADS, HEAD_DIM)

    def require(self, out: torch.Tensor) -> None:
        """ValueError if a contender's result is not `expected`."""
        wrong = (out.reshape(self.expected.shape).float() - self.expected).norm()
        wrong = (wrong / self.expected.norm()).item()
        if not wrong < 0.02:
            raise ValueError(f"its answer differs by {wrong:.1%}")

    def free(self) -> None:
        """Frees the tensors; they are made anew when they are used again."""
        for name in ("query", "planes", "tables", "expected", "_ids"):
            self.__dict__.pop(name, None)

    def as_dict(self) -> dict:
        return asdict(self)


SHAPES = {
    "decode 8x4096": ([1] * 8, [4096] * 8),
    "decode 1x32768": ([1], [32768]),
    "decode 64x512": ([1] * 64, [512] * 64),
    "decode skewed": ([1] * 8, [256] * 7 + [16384]),
    "prefill 1x2048": ([2048], [2048]),
    "prefill 4x512": ([512] * 4, [512] * 4),
    "mixed": ([256, 256] + [1] * 6, [256, 2048] + [2048] * 6),
}
FEW = "decode 8x4096", "decode 64x512", "prefill 1x2048", "mixed"
CASES = [
    Case(shape, *SHAPES[shape], block_size, dtype_name)
    for dtype_name, block_size, shapes in (
        ("bfloat16", 16, SHAPES),
        ("float32", 16, FEW),
        ("float16", 16, FEW),
        ("bfloat16", 128, FEW),
    )
    for shape in shapes
]

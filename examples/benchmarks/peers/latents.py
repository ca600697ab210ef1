"""Decodes over a latent cache (MLA), whose first columns are the values, on a GPU."""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.peers.flashinfer import WORKSPACE_BYTES, generation

PAGE = 64  # tokens: as large as these kernels like them
IN_VLLM = "vllm.third_party.flashmla.flash_mla_interface"  # where no package flash_mla is


@dataclass(frozen=True)
class Latents:
    """Sequences of one length, in bfloat16, in pages that lie anywhere."""

    num_seqs: int
    length: int
    heads: int
    widths: tuple[int, int]  # columns that are values too, and columns that are keys alone
    device: str = "cuda"

    @cached_property
    def query(self) -> torch.Tensor:
        """`[num_seqs, heads, columns]`."""
        size = self.num_seqs, self.heads, sum(self.widths)
        return torch.randn(size, dtype=torch.bfloat16, device=self.device)

    @cached_property
    def cache(self) -> torch.Tensor:
        """`[num_pages, PAGE, columns]`."""
        size = self.num_seqs * self.length // PAGE, PAGE, sum(self.widths)
        return torch.randn(size, dtype=torch.bfloat16, device=self.device)

    @cached_property
    def tables(self) -> torch.Tensor:
        ids = torch.randperm(len(self.cache), dtype=torch.int32, device=self.device)
        return ids.view(self.num_seqs, -1)

    @cached_property
    def lengths(self) -> torch.Tensor:
        return torch.full((self.num_seqs,), self.length, dtype=torch.int32, device=self.device)

    @property
    def scale(self) -> float:
        return sum(self.widths) ** -0.5

    def require(self, out: torch.Tensor) -> None:
        """AssertionError if a result is wrong, judged by its first sequence."""
        keys = self.cache[self.tables[0]].view(1, self.length, -1).float()
        values = keys[..., : self.widths[0]]
        want = scaled_dot_product_attention(self.query[:1].float(), keys, values)
        torch.testing.assert_close(out[:1].float(), want, atol=2e-2, rtol=2e-2)


def flashinfer(work: Latents) -> Callable:
    """BatchMLAPagedAttentionWrapper."""
    starts = torch.arange(work.num_seqs + 1, dtype=torch.int32, device="cuda")
    room = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    mla = importlib.import_module("flashinfer.mla")
    wrapper = mla.BatchMLAPagedAttentionWrapper(room, backend=generation())
    wrapper.plan(
        qo_indptr=starts,
        kv_indptr=starts * work.tables.shape[1],
        kv_indices=work.tables.flatten(),
        kv_len_arr=work.lengths,
        num_heads=work.heads,
        head_dim_ckv=work.widths[0],
        head_dim_kpe=work.widths[1],
        page_size=PAGE,
        causal=True,
        sm_scale=work.scale,
        q_data_type=work.query.dtype,
        kv_data_type=work.cache.dtype,
    )
    parts = [*work.query.split(work.widths, -1), *work.cache.split(work.widths, -1)]
    return lambda _: wrapper.run(*parts)


def flashmla(work: Latents) -> Callable:
    """flash_mla_with_kvcache; its schedule is made before, or by the first call for all others."""
    own = importlib.util.find_spec("flash_mla")
    mla: Any = importlib.import_module("flash_mla" if own else IN_VLLM)
    plan = mla.get_mla_metadata(work.lengths, work.heads, 1)
    query, cache = work.query[:, None], work.cache[:, :, None]
    facts = work.tables, work.lengths, work.widths[0], *plan

    def call(index: int) -> torch.Tensor:
        del index
        out, _ = mla.flash_mla_with_kvcache(query, cache, *facts, softmax_scale=work.scale)
        return out[:, 0]

    return call


LATENTS = {"FlashInfer": flashinfer, "FlashMLA": flashmla}

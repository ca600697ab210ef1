"""FlashAttention's paged kernels on a GPU.

FlashAttention-4 is the package flash-attn-4. FlashAttention-3 has no wheels of its own with paging
in it; vLLM's has its kernels, as `vllm.vllm_flash_attn`.
"""

import functools
import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks.case import HEAD_DIM, HEADS, KV_HEADS, GpuCase


class Paged(NamedTuple):
    """One table set of a case: key and value of the cache, the tables, lengths and starts."""

    key: torch.Tensor
    value: torch.Tensor
    tables: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor


def flash4(case: GpuCase, block_size: int | None = None) -> Callable:
    """flash_attn_varlen_func of flash-attn-4; its pages of 128 are loaded by TMA."""
    attend = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    paged = _paged(case, block_size)

    def call(index):
        key, value, tables, lens, starts = paged[index % len(paged)]
        options = {"cu_seqlens_q": starts, "seqused_k": lens, "page_table": tables}
        longest = {"max_seqlen_q": max(case.query_lens), "max_seqlen_k": max(case.seq_lens)}
        return attend(case.query, key, value, **options, **longest, causal=True)[0]

    return call


def flash3(case: GpuCase, block_size: int | None = None) -> Callable:
    """flash_attn_varlen_func of vLLM with FlashAttention-3, its schedule made before."""
    flash = importlib.import_module("vllm.vllm_flash_attn")
    paged = _paged(case, block_size)
    longest = max(case.query_lens), max(case.seq_lens)
    plans = [
        flash.get_scheduler_metadata(
            *(len(case.seq_lens), *longest, HEADS, KV_HEADS, HEAD_DIM),
            cache_seqlens=part.lens,
            cu_seqlens_q=part.starts,
            page_size=part.key.shape[1],
            causal=True,
        )
        for part in paged
    ]

    def call(index):
        key, value, tables, lens, starts = paged[index % len(paged)]
        rows = case.query, key, value, longest[0], starts, longest[1]
        options = {"seqused_k": lens, "block_table": tables, "causal": True, "fa_version": 3}
        plan = plans[index % len(plans)]
        return flash.flash_attn_varlen_func(*rows, **options, scheduler_metadata=plan)

    return call


def _paged(case: GpuCase, block_size: int | None) -> list[Paged]:
    """The table sets of a case, in blocks of its own size or copied to those of another."""
    if block_size is None:
        tables = [batch.block_tables.clamp(min=0) for batch in case.batches]
        parts = [(*case.cache.planes, part) for part in tables]
    else:
        parts = [
            _copied(case, batch.block_tables.clamp(min=0), block_size) for batch in case.batches
        ]
    return [
        Paged(*part, batch.seq_lens, batch.query_start_loc)
        for part, batch in zip(parts, case.batches, strict=True)
    ]


def _copied(case, tables, block_size) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if tables.shape[1] * case.block_size % block_size or case.block_size == block_size:
        raise ValueError(f"its tables are no whole blocks of {block_size}, or are such already")
    planes = (plane.index_select(0, tables.flatten()) for plane in case.cache.planes)
    key, value = (plane.view(-1, block_size, KV_HEADS, HEAD_DIM) for plane in planes)
    ids = torch.arange(len(key), dtype=torch.int32, device=key.device)
    return key, value, ids.view(len(tables), -1)


FLASH = {
    "FlashAttention-4": flash4,
    "FlashAttention-4, block 128": functools.partial(flash4, block_size=128),
    "FlashAttention-3": flash3,
    "FlashAttention-3, block 128": functools.partial(flash3, block_size=128),
}

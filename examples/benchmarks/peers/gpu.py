"""The usual ways in torch and JAX on a GPU, JAX's Pallas kernel, and xFormers'."""

import importlib
import importlib.util
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pagedattn_interop
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import pagedattn_torch
from benchmarks.case import GROUP, HEAD_DIM, HEADS, KV_HEADS, SCALE, GpuCase
from benchmarks.peers.flash import FLASH


def xformers_split_k(case: GpuCase) -> Callable:
    """xFormers' Triton split-K with its defaults, on pages."""
    # Asked why it cannot run, our backend loads the package as this torch needs it.
    pagedattn_torch.explain(case.query, case.cache, case.batches[0])
    old = importlib.util.find_spec("xformers")
    ops = importlib.import_module("xformers.ops.fmha" if old else "mslk.attention.fmha")
    if case.block_size % ops.triton_splitk.FwOp.BLOCK_N:
        raise ValueError("its blocks of 64 keys must lie in one page")
    causal = case.like_queries > 1
    masks = [_xformers_mask(ops.attn_bias, case, batch, causal) for batch in case.batches]
    query = case.query.unflatten(1, (KV_HEADS, GROUP))[None]
    key, value = (
        plane.flatten(0, 1)[None, :, :, None].expand(-1, -1, -1, GROUP, -1)
        for plane in case.cache.planes
    )

    def call(index):
        mask = masks[index % len(masks)]
        attend = ops.memory_efficient_attention_forward
        return attend(query, key, value, mask, op=ops.triton_splitk.FwOp)

    return call


def _xformers_mask(masks, case, batch, causal):
    kind = (
        masks.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
        if causal
        else masks.PagedBlockDiagonalPaddedKeysMask
    )
    return kind.from_seqlens(
        case.query_lens,
        case.seq_lens,
        batch.block_tables.clamp(min=0),
        case.block_size,
        device=batch.seq_lens.device,
    )


def torch_gather(case: GpuCase) -> Callable:
    """torch's attention on gathered pages."""
    attend = _torch_attention(case)
    tables = [batch.block_tables.clamp(min=0) for batch in case.batches]
    return lambda index: attend(*_gathered(case, tables[index % len(tables)]))


def torch_dense(backend: SDPBackend) -> Callable:
    """torch's attention on keys that lie in order: the speed without paging."""

    def prepare(case: GpuCase) -> Callable:
        attend = _torch_attention(case)
        dense = [_gathered(case, batch.block_tables.clamp(min=0)) for batch in case.batches]
        if case.prefill:  # heads repeated: the rate of cuDNN and FlashAttention is the same
            dense = [[p.repeat_interleave(GROUP, 1) for p in pair] for pair in dense]

        def call(index):
            with sdpa_kernel(backend):
                return attend(*dense[index % len(dense)])

        return call

    return prepare


def _gathered(case, tables):
    """Keys and values `[num_seqs, kv_heads, keys, head_dim]`."""
    planes = case.cache.key, case.cache.value
    pages = (plane.index_select(0, tables.flatten()) for plane in planes)
    return [p.view(len(tables), -1, KV_HEADS, HEAD_DIM).transpose(1, 2) for p in pages]


def _torch_attention(case) -> Callable:
    shape = len(case.seq_lens), case.like_queries
    if case.prefill:
        query = case.query.view(*shape, HEADS, HEAD_DIM).transpose(1, 2)

        def attend(key, value):
            shared = key.shape[1] != HEADS
            out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shared)
            return out.transpose(1, 2).flatten(0, 1)

        return attend
    # Query heads of a group are folded into the query axis, so that their keys are read once.
    query = case.query.view(*shape, KV_HEADS, GROUP, HEAD_DIM).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = _mask(case)

    def attend_folded(key, value):
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        out = out.view(shape[0], KV_HEADS, GROUP, shape[1], HEAD_DIM).permute(0, 3, 1, 2, 4)
        return out.reshape(-1, HEADS, HEAD_DIM)

    return attend_folded


def _mask(case) -> torch.Tensor | None:
    """Which keys each folded query sees, or None for all."""
    num_queries = case.like_queries
    if num_queries == 1 and case.like_keys:
        return None  # pages have no unused slots: in no case is a last page partly filled
    lens = torch.tensor(case.seq_lens[:1] if case.like_keys else case.seq_lens, device="cuda")
    last = lens[:, None] - num_queries + torch.arange(num_queries, device="cuda")
    keys = torch.arange(case.batches[0].max_blocks * case.block_size, device="cuda")
    return (keys <= last.repeat(1, GROUP)[..., None])[:, None]


def jax_gather(case: GpuCase) -> tuple[Callable, list]:
    """jax.nn.dot_product_attention by cuDNN, on gathered pages."""
    attend = _jax_attention(case)

    def call(query, operands):
        planes, tables, lens = operands
        return attend(query, *(_pages(plane, tables) for plane in planes), lens)

    return call, _jax_operands(case)


def jax_dense(case: GpuCase) -> tuple[Callable, list]:
    """The same on keys that lie in order."""
    attend = _jax_attention(case)
    operands = [
        (*(_pages(plane, tables) for plane in planes), lens)
        for planes, tables, lens in _jax_operands(case)
    ]
    return lambda query, dense: attend(query, *dense), operands


def _jax_operands(case) -> list:
    cache, batches = pagedattn_interop.to_jax((case.cache, case.batches))
    return [
        ((cache.key, cache.value), jnp.maximum(batch.block_tables, 0), batch.seq_lens)
        for batch in batches
    ]


def _pages(plane, tables):
    return plane[tables].reshape(len(tables), -1, KV_HEADS, HEAD_DIM)


def _jax_attention(case) -> Callable:
    num_queries = case.like_queries
    if num_queries > 1 and not case.prefill:
        raise ValueError("its causal mask is aligned with the first key")

    def attend(query, key, value, lens):
        out = jax.nn.dot_product_attention(
            query.reshape(-1, num_queries, HEADS, HEAD_DIM),
            key,
            value,
            is_causal=case.prefill,
            key_value_seq_lengths=None if case.like_keys else lens,
            implementation="cudnn",
        )
        return out.reshape(query.shape)

    return attend


def pallas(case: GpuCase) -> tuple[Callable, list]:
    """jax.experimental's Pallas kernel; its cache has the heads before the pages."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    if case.like_queries > 1:
        raise ValueError("one query a sequence")
    shared = _jax_operands(case)
    planes = tuple(plane.transpose(2, 0, 1, 3) for plane in shared[0][0])
    splits = math.gcd(16, case.batches[0].max_blocks)

    def call(query, operands):
        planes, tables, lens = operands
        blocks = max(1, 128 // case.block_size)
        query = query * SCALE
        return paged_attention(
            query, *planes, tables, lens, k_splits=splits, pages_per_compute_block=blocks
        )

    return call, [(planes, *rest) for _, *rest in shared]


TORCH_PEERS = {
    "xFormers split-K": xformers_split_k,
    "torch gather + SDPA": torch_gather,
    "torch SDPA cuDNN, dense": torch_dense(SDPBackend.CUDNN_ATTENTION),
    "torch SDPA FLASH, dense": torch_dense(SDPBackend.FLASH_ATTENTION),
    **FLASH,
}
JAX_PEERS = {
    "JAX gather + cuDNN": jax_gather,
    "JAX cuDNN, dense": jax_dense,
    "JAX Pallas": pallas,
}

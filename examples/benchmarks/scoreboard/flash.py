"""FlashAttention's paged kernels: versions 2 and 3 as in vLLM's wheel, and the package of 4."""

import functools
import importlib
from typing import Any

from benchmarks.scoreboard.peer import Answer, Peer, lens, planes, scale_of, starts, tables, tensor
from pagedattn.testing import Problem

DEVICE = "cuda"
WINDOWS = frozenset({"scale", "sliding_window", "logits_soft_cap", "lse", "causal=False"})


def _common(problem: Problem) -> dict[str, Any]:
    spec = problem.spec
    longest = {
        "max_seqlen_q": max(map(int, problem.query_lens)),
        "max_seqlen_k": max(map(int, problem.seq_lens)),
    }
    given = {"softmax_scale": scale_of(problem), "causal": spec.causal}
    cap = {"softcap": spec.logits_soft_cap or 0.0}
    where = {"cu_seqlens_q": starts(problem), "seqused_k": lens(problem)}
    return longest | given | cap | {n: tensor(x, DEVICE) for n, x in where.items()}


def _window(problem: Problem) -> tuple[int, int] | None:
    """To the left and to the right, the token itself not counted."""
    if problem.spec.sliding_window is None:
        return None
    left = problem.spec.sliding_window - 1
    return left, 0 if problem.spec.causal else left


def _operands(problem: Problem):
    return [tensor(array, DEVICE) for array in (problem.query, *planes(problem))]


def of_vllm(problem: Problem, version: int) -> Answer:
    flash = importlib.import_module("vllm.vllm_flash_attn")
    options = _common(problem) | {"fa_version": version, "return_softmax_lse": True}
    options["block_table"] = tensor(tables(problem), DEVICE)
    if window := _window(problem):
        options["window_size"] = list(window)
    if problem.spec.alibi_slopes:
        import torch

        options["alibi_slopes"] = torch.tensor(problem.spec.alibi_slopes, device=DEVICE)
    if problem.sinks is not None:
        options["s_aux"] = tensor(problem.sinks, DEVICE).to(tensor(problem.query).dtype)
    out, lse = flash.flash_attn_varlen_func(*_operands(problem), **options)
    return out.float().cpu(), lse.T.float().cpu()


def flash4(problem: Problem) -> Answer:
    attend = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    options = _common(problem) | {"page_table": tensor(tables(problem), DEVICE)}
    options |= {"window_size": _window(problem) or (None, None), "return_lse": True}
    if problem.sinks is not None:
        sinks = tensor(problem.sinks, DEVICE)
        options["learnable_sink"] = sinks.to(tensor(problem.query).dtype)
    out, lse = attend(*_operands(problem), **options)
    return out.float().cpu(), lse.T.float().cpu()


def _peer(version: int, takes: frozenset[str], remark: str = "") -> Peer:
    return Peer(
        functools.partial(of_vllm, version=version),
        takes | {"float16"},
        modules=("vllm.vllm_flash_attn",),
        install="pip install vllm",
        packages=("vllm", "torch"),
        device="cuda",
        about=f"`flash_attn_varlen_func` of vLLM's wheel with `fa_version={version}` and a "
        f"`block_table`{remark}",
    )


FLASH = {
    "FlashAttention-2": _peer(
        2,
        WINDOWS | {"alibi_slopes"},
        "; if no sequence has more than one new token, it counts on one of each "
        "([its issue](https://github.com/Dao-AILab/flash-attention/issues/1537))",
    ),
    "FlashAttention-3": _peer(3, WINDOWS | {"sinks"}),
    "FlashAttention-4": Peer(
        flash4,
        WINDOWS | {"sinks", "float16"},
        modules=("flash_attn.cute",),
        install="pip install flash-attn-4",
        packages=("flash-attn-4", "nvidia-cutlass-dsl", "torch"),
        device="cuda",
        about="`flash_attn_varlen_func` of flash-attn-4 with a `page_table`; of pages that hold "
        "whole tiles of keys, as those of 32 do not, it asks that unused slots be finite",
    ),
}

"""FlashInfer's wrappers over a paged cache, on a GPU."""

import importlib
import itertools
import math

from benchmarks.scoreboard.peer import Answer, Peer, planes, scale_of, starts, tensor
from pagedattn.extend import cdiv
from pagedattn.testing import Problem

DEVICE = "cuda"
WORKSPACE_BYTES = 128 << 20


def flashinfer(problem: Problem) -> Answer:
    """Its wrappers for prefills, which take decodes too, so that one call is one mixed batch."""
    import torch

    query, key, value = (tensor(x, DEVICE) for x in (problem.query, *planes(problem)))
    room = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)
    (planned, given), spec = _wrapper(problem, room, query.dtype, key.dtype), problem.spec
    counts = [cdiv(int(n), problem.block_size) for n in problem.seq_lens]
    begins = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    pairs = zip(problem.block_tables, counts, strict=True)
    ids = [block for row, count in pairs for block in row[:count]]
    last = [(int(n) - 1) % problem.block_size + 1 for n in problem.seq_lens]
    planned.plan(
        tensor(starts(problem)),
        begins,
        torch.tensor(ids, dtype=torch.int32, device=DEVICE),
        torch.tensor(last, dtype=torch.int32),
        *(query.shape[1], key.shape[2], query.shape[2], problem.block_size),
        causal=spec.causal,
        sm_scale=scale_of(problem),
        window_left=-1 if spec.sliding_window is None else spec.sliding_window - 1,
        logits_soft_cap=spec.logits_soft_cap,
        q_data_type=query.dtype,
        kv_data_type=key.dtype,
    )
    scales = {"k_scale": problem.key_scale, "v_scale": problem.value_scale}
    scales = {name: float(scale) for name, scale in scales.items() if scale is not None}
    out, lse = planned.run(query, (key, value), *given, return_lse=True, **scales)
    return out.float().cpu(), (lse * math.log(2)).float().cpu()  # its logarithm is that of base 2


def _wrapper(problem: Problem, room, query_dtype, cache_dtype):
    """The wrapper, unplanned, and what its `run` is given beside queries and pages."""
    module = importlib.import_module("flashinfer")
    if problem.sinks is None:
        return module.BatchPrefillWithPagedKVCacheWrapper(room, "NHD"), ()
    window, head_dim = problem.spec.sliding_window, problem.query.shape[2]
    wrapper = module.BatchAttentionWithAttentionSinkWrapper(
        room,
        "NHD",
        q_data_type=query_dtype,
        kv_data_type=cache_dtype,
        head_dim_qk=head_dim,
        head_dim_vo=head_dim,
        window_left=-1 if window is None else window - 1,
    )
    return wrapper, (tensor(problem.sinks, DEVICE), scale_of(problem))


def _lacks(cell) -> str | None:
    if cell.row in ("sliding_window", "all") and cell.column in ("encoder", "cross"):
        return "its windows are to the left only"
    return None


FLASHINFER = {
    "FlashInfer": Peer(
        flashinfer,
        frozenset(
            {"scale", "sliding_window", "logits_soft_cap", "sinks", "cache_dtype", "lse"}
            | {"causal=False", "float16"}
        ),
        modules=("flashinfer",),
        install="pip install flashinfer-python",
        packages=("flashinfer-python", "torch"),
        device="cuda",
        about="`BatchPrefillWithPagedKVCacheWrapper`, for decodes too, and for sinks "
        "`BatchAttentionWithAttentionSinkWrapper`; its ALiBi has the standard slopes only, and its "
        "latent caches wrappers of their own, which are not asked",
        lacks=_lacks,
    )
}

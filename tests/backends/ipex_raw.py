"""Raw calls of the extension's paged operators, and what they should give."""

import functools
import math
import multiprocessing
from dataclasses import dataclass, replace
from importlib.util import find_spec

import pytest

if find_spec("intel_extension_for_pytorch") is None:
    pytest.skip("needs intel_extension_for_pytorch", allow_module_level=True)

import torch
from intel_extension_for_pytorch.llm.modules import PagedAttention

HEAD_DIM = 16
CLOSE = 1e-5  # greatest error of a right result in float32


@dataclass(frozen=True)
class Case:
    """A cache [blocks, kv heads, slots, head_dim], tables of its blocks, and who asks what."""

    query: torch.Tensor  # [tokens, heads, head_dim]
    key: torch.Tensor
    value: torch.Tensor
    tables: torch.Tensor  # i32[sequences, blocks of a row]
    seq_lens: list[int]
    query_lens: list[int]

    @property
    def block_size(self) -> int:
        return self.key.shape[2]

    def swap(self, **fields) -> "Case":
        return replace(self, **fields)


def case_of(seq_lens, query_lens=None, *, heads=4, kv_heads=2, block_size=16, dtype=torch.float32):
    """Random case; no two sequences share a block, and block ids are not in order."""
    query_lens = query_lens or [1] * len(seq_lens)
    generator = torch.Generator().manual_seed(0)
    width = max(1, math.ceil(max(seq_lens) / block_size))
    blocks = len(seq_lens) * width
    normal = functools.partial(torch.randn, generator=generator, dtype=dtype)
    tables = torch.randperm(blocks, generator=generator).int().view(len(seq_lens), width)
    page = blocks, kv_heads, block_size, HEAD_DIM
    query = normal(sum(query_lens), heads, HEAD_DIM)
    return Case(query, normal(page), normal(page), tables, list(seq_lens), list(query_lens))


def decode(case: Case, **options) -> torch.Tensor:
    """The operator for one query a sequence."""
    out = torch.full_like(case.query, 7.0)  # neither 0 nor a likely result
    kv_heads = case.key.shape[1]
    calls = {
        "output": out,
        "query": case.query,
        "key_cache": case.key,
        "value_cache": case.value,
        "head_mapping": torch.arange(case.query.shape[1]).int() * kv_heads // case.query.shape[1],
        "scale": HEAD_DIM**-0.5,
        "block_tables": case.tables,
        "context_lens": torch.tensor(case.seq_lens, dtype=torch.int32),
        "block_size": case.block_size,
        "max_context_len": max(case.seq_lens),
        "alibi_slopes": None,
    }
    PagedAttention.single_query_cached_kv_attention(**calls | options)
    return out


def starts(lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


def varlen(case: Case, **options) -> torch.Tensor:
    """The operator for several queries a sequence; causal unless told."""
    out = torch.full_like(case.query, 7.0)
    calls = {
        "output": out,
        "query": case.query,
        "key_cache": case.key,
        "value_cache": case.value,
        "cu_seqlens_q": starts(case.query_lens),
        "cu_seqlens_kv": starts(case.seq_lens),
        "max_seqlen_q": max(case.query_lens),
        "max_seqlen_kv": max(case.seq_lens),
        "scale": HEAD_DIM**-0.5,
        "is_cusal": True,
        "block_tables": case.tables,
        "alibi_slopes": None,
    }
    PagedAttention.flash_attn_varlen_func(**calls | options)
    return out


OPERATORS = {"decode": decode, "varlen": varlen}
every_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)


def expected(case: Case, *, window=None, cap=None, slopes=None) -> torch.Tensor:
    """Causal attention in float64; rows that see nothing are 0."""
    rows = zip(case.query.double().split(case.query_lens), case.tables, case.seq_lens, strict=True)
    return torch.cat([_sequence(case, *row, window, cap, slopes) for row in rows])


def _sequence(case, query, table, seq_len, window, cap, slopes):
    group = query.shape[1] // case.key.shape[1]
    key, value = (
        plane[table.long()].double().transpose(1, 2).flatten(0, 1)[:seq_len]
        for plane in (case.key, case.value)
    )
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * HEAD_DIM**-0.5
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    at = torch.arange(len(query))[:, None] + seq_len - len(query)
    back = at - torch.arange(seq_len)
    scores = scores if slopes is None else scores - slopes.double()[:, None, None] * back
    seen = (back >= 0) if window is None else (back >= 0) & (back < window)
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, value)


def error(out: torch.Tensor, want: torch.Tensor) -> float:
    """Largest absolute difference; NaN where either has one."""
    return (out.double() - want).abs().max().item()


def isolated(function, *args, seconds=60):
    """What `function` returns in a process of its own; None where that process dies or hangs."""
    # A fork of a server that has the extension loaded: a tenth of a second, not seven.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["intel_extension_for_pytorch"])
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(writer, function, *args), daemon=True)
    process.start()
    writer.close()
    try:
        result = reader.recv() if reader.poll(seconds) else None
    except EOFError:
        result = None
    else:
        process.kill()  # what it does after its answer is of no interest
    process.join()
    if process.exitcode == 1:
        raise RuntimeError(f"{function.__name__} raised an error, which it printed")
    return result


def _send(writer, function, *args):
    writer.send(function(*args))

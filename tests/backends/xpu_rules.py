"""The extension's operators as they are on an XPU, by their source: what they demand, and compute.

A stand-in for an XPU: tensors lie on the CPU, results are float64 arithmetic, rounded at the end.
What each does wrong is done here too: masked values are multiplied by 0, rows that see nothing are
NaN, ALiBi goes by a key's position, options are dropped.
"""

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pagedattn_torch.backends import ipex

HALVES = (torch.float16, torch.bfloat16)
TILE = 64  # queries
WAITING = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "repeat_interleave.Tensor")


def stand_in_for_xpu(monkeypatch) -> "PagedAttention":
    """Operators in place of the extension's; tensors on the CPU are said to lie on an XPU."""
    operators = PagedAttention()
    monkeypatch.setattr(ipex, "why_unusable", list)
    monkeypatch.setattr("pagedattn._dispatch.call.device_of", lambda array: "xpu")
    monkeypatch.setattr(ipex.xpu, "paged_operators", lambda: operators)
    return operators


class NeverWaits(TorchDispatchMode):
    """Raises where the host would read what a device holds."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(name in str(func) for name in WAITING), f"{func} waits for the device"
        if "index" in str(func):
            picks = [x for part in args if isinstance(part, list | tuple) for x in part]
            assert not any(getattr(x, "dtype", None) is torch.bool for x in picks), "waits: a mask"
        return func(*args, **kwargs or {})


class PagedAttention:
    """The operators, by keyword only: the order of the CPU's arguments is another."""

    def __init__(self):
        self.calls = []

    def single_query_cached_kv_attention(
        self, *, output, query, key_cache, value_cache, head_mapping, scale, block_tables,
        context_lens, block_size, max_context_len, alibi_slopes, window_size=-1, softcap=-1.0,
    ):  # fmt: skip
        """Caches `[blocks, heads, head_dim, slots]`, read in place; window_size is ignored."""
        self.calls.append(("decode", key_cache.data_ptr(), value_cache.data_ptr()))
        with _disable_current_modes():
            check_arrays(query, key_cache, value_cache, output, block_tables, context_lens)
            heads = query.shape[1] // key_cache.shape[1]
            assert (head_mapping == 0).sum() == heads  # all that it is read for
            assert head_mapping.dtype is torch.int32
            assert block_size in (16, 32)
            assert block_size == key_cache.shape[3]
            assert query.shape[2] == key_cache.shape[2] <= 256
            assert len(context_lens) == len(block_tables) == len(query)
            check_slopes(alibi_slopes, query)
            cap = softcap if max_context_len > 512 else -1.0
            for seq, length in enumerate(context_lens.tolist()):
                assert 0 <= length <= max_context_len, "lengths of garbage lead out of the tables"
                blocks = table_row(block_tables[seq], length, block_size, len(key_cache))
                key, value = (  # of whole blocks
                    part[blocks].permute(0, 3, 1, 2).flatten(0, 1)
                    for part in (key_cache, value_cache)
                )
                seen = torch.arange(len(key)) < length
                output[seq] = attend(
                    query[seq : seq + 1], key, value, seen[None], scale, cap, alibi_slopes
                )

    def flash_attn_varlen_func(
        self, *, output, query, key_cache, value_cache, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q,
        max_seqlen_kv, scale, is_cusal, block_tables, alibi_slopes, window_size_left=-1,
        window_size_right=-1, softcap=-1.0,
    ):  # fmt: skip
        """Caches `[blocks, slots, heads, head_dim]`, read in place: tiles of queries by pages."""
        self.calls.append(("packed", key_cache.data_ptr(), value_cache.data_ptr()))
        with _disable_current_modes():
            check_arrays(
                query, key_cache, value_cache, output, block_tables, cu_seqlens_q, cu_seqlens_kv
            )
            size = key_cache.shape[1]
            assert size in (64, 128)
            assert query.shape[2] == key_cache.shape[3] <= 512
            assert len(cu_seqlens_q) == len(cu_seqlens_kv) == len(block_tables) + 1
            check_slopes(alibi_slopes, query)
            tables = block_tables[:, : -(-max_seqlen_kv // size)]
            reach = [r if r < max_seqlen_kv else -1 for r in (window_size_left, window_size_right)]
            for seq, lengths in enumerate(
                zip(cu_seqlens_q.diff(), cu_seqlens_kv.diff(), strict=True)
            ):
                queries, keys = (int(n) for n in lengths)
                start = int(cu_seqlens_q[seq])
                assert 0 <= start <= start + queries <= len(query)
                assert queries <= max_seqlen_q
                blocks = table_row(tables[seq], keys, size, len(key_cache))
                key, value = (
                    part[blocks].flatten(0, 1)[:keys] for part in (key_cache, value_cache)
                )
                for first in range(0, queries, TILE):
                    rows = slice(start + first, start + min(first + TILE, queries))
                    at = torch.arange(rows.stop - rows.start)[:, None] + keys - queries + first
                    seen = visible(at, torch.arange(keys), is_cusal, *reach)
                    touched = pages_of(seen, at, is_cusal and reach == [-1, -1], size)
                    output[rows] = attend(
                        query[rows], key[touched], value[touched], seen[:, touched], scale,
                        softcap, alibi_slopes, torch.arange(keys)[touched],
                    )  # fmt: skip


def check_arrays(query, key, value, output, *integers):
    assert query.dtype is key.dtype is value.dtype is output.dtype
    assert query.dtype in HALVES
    for array in (query, key, value, output, *integers):
        assert array.is_contiguous()
    for array in integers:
        assert array.dtype is torch.int32


def check_slopes(slopes, query):
    if slopes is not None:
        assert slopes.dtype is torch.float32
        assert slopes.shape == query.shape[1:2]


def table_row(row, length, size, num_blocks):
    blocks = row[: -(-length // size)].long()
    assert len(blocks) * size >= length, "lengths of garbage lead out of the tables"
    assert ((blocks >= 0) & (blocks < num_blocks)).all()
    return blocks


def visible(at, keys, causal, left, right):
    """bool `[queries, keys]`."""
    if left == right == -1:
        # Compared without a sign: a tile that begins before key 0 hides nothing.
        return (keys <= at) | (at[0] < 0) if causal else torch.ones_like(keys <= at)
    right = 0 if causal else right
    near = keys <= at + right if right >= 0 else torch.ones_like(keys <= at)
    return near & (keys >= at - left) if left >= 0 else near


def pages_of(seen, at, causal, size):
    """Which keys lie in the pages that a tile of queries loads."""
    some = seen.any(0)
    pages = torch.arange(len(some)) // size
    return torch.isin(pages, pages[some]) if len(some) else some


def attend(query, key, value, seen, scale, cap, slopes, positions=None):
    """`[q, heads, dim]`; NaN for rows that see nothing; a weight of 0 times NaN is NaN."""
    group = query.shape[1] // key.shape[1]
    query, key, value = query.double(), key.double(), value.double()
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->hqk", query, key) * scale
    logits = cap * torch.tanh(logits / cap) if cap > 0 else logits
    if slopes is not None:
        positions = torch.arange(len(key)) if positions is None else positions
        logits = logits + slopes.double()[:, None, None] * positions
    weights = logits.masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value) if len(key) else query * math.nan

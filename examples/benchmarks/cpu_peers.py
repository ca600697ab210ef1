"""The peers that cpu.py compares with: the usual ways in torch and JAX.

A contender takes a `Case` and returns a function without arguments that computes it; it raises for
a case that it cannot compute.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pagedattn_interop
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.cpu_case import SCALE, Case
from benchmarks.work import HEAD_DIM, HEADS, KV_HEADS
from pagedattn.extend import cdiv

GROUP = HEADS // KV_HEADS


def dense(case: Case) -> Callable:
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


def gather_each(case: Case) -> Callable:
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


def jax_gather(case: Case) -> Callable:
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


PEERS = {
    "torch SDPA, dense": dense,
    "torch gather + SDPA": gather_each,
    "JAX gather + einsum": jax_gather,
}

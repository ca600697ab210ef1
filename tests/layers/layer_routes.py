"""The ways through a layer, one step of each: what is attended to, and the oracle's answer."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch_layers import dense, normal, reference, spec_of, step_of

from pagedattn import AttentionSpec
from pagedattn.testing import random_problem
from pagedattn_torch import AttentionMetadata


class Route(NamedTuple):
    """A forward's tensors `[tokens, heads, head_size]`, its other arguments, and the right out."""

    layer: Any
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    kv_cache: torch.Tensor | None
    meta: AttentionMetadata
    kind: str
    want: np.ndarray


CHUNK = ([20, 1, 3], [33, 17, 3])
WINDOW = AttentionSpec(sliding_window=5)
PAGED = {
    "prompts with tables": ([20, 3], [20, 3], AttentionSpec(), 16, 16),
    "chunk": (*CHUNK, AttentionSpec(), 16, 16),
    "windowed chunk": (*CHUNK, WINDOW, 16, 16),
    "decode": ([1, 1, 1], [17, 40, 1], AttentionSpec(), 16, 16),
    "windowed decode": ([1, 1, 1], [17, 40, 1], WINDOW, 16, 16),
    "blocks of 8": ([1, 1, 1], [17, 40, 1], AttentionSpec(), 16, 8),
} | {f"head size {n}": ([1, 1], [17, 40], AttentionSpec(), n, 16) for n in (80, 96, 112, 120, 192)}
PACKED = ("prompts without tables", "profiling run", "encoder", "encoder_only")
ROUTES = (*PAGED, *PACKED, "cross", "cross without tables")


def route(name: str, cls, dtype=torch.float16, block_size: int | None = None) -> Route:
    """The step of a name for a layer class, over blocks of its own size unless another is said."""
    if name in PAGED:
        *lens, own_size = PAGED[name]
        return _paged(cls, *lens, block_size or own_size, dtype)
    if name in PACKED:
        return _packed(name, cls, dtype)
    return _cross(name, cls, dtype, block_size or 16)


def _paged(cls, query_lens, seq_lens, spec, head_size, block_size, dtype):
    sizes = {"head_dim": head_size, "block_size": block_size}
    half = np.dtype(str(dtype).removeprefix("torch."))
    problem = random_problem(query_lens, seq_lens, spec, dtype=half, **sizes)
    layer = cls(4, head_size, num_kv_heads=2, sliding_window=spec.sliding_window)
    query, key, value, kv_cache, meta = step_of(problem)
    return Route(layer, (query, key, value), kv_cache, meta, "decoder", reference(problem))


def _packed(name, cls, dtype):
    lens = [7, 1, 12]
    layer, rows = cls(4, 16, num_kv_heads=2), _rows(20, 20, dtype)
    kind = name if name.startswith("encoder") else "decoder"
    own = {"encoder_seq_lens": lens} if kind == "encoder" else {"seq_lens": lens}
    kv_cache = None if name == "profiling run" else normal(0, 2, 4, 16, 2, 16, dtype=dtype)
    meta = AttentionMetadata(
        num_prefills=3,
        num_prefill_tokens=0 if kind == "encoder" else 20,
        num_decode_tokens=0,
        slot_mapping=torch.arange(3, 23) if kind == "decoder" else None,
        **own,
    )
    return Route(layer, rows, kv_cache, meta, kind, _dense(layer, kind, rows, lens, lens))


def _cross(name, cls, dtype, block_size):
    queries, keys = [5, 1], [9, 18]
    fields = {"encoder_lens": keys, "cross_block_tables": [[1], [0, 2]], "block_size": block_size}
    meta = AttentionMetadata.from_lists(queries, [0, 0], [[4], [5]], **fields)
    if name == "cross without tables":
        meta = _without_cross_tables(meta)
    layer, rows = cls(4, 16, num_kv_heads=2), _rows(6, 27, dtype)
    kv_cache = torch.full((2, 6, block_size, 2, 16), torch.nan, dtype=dtype)
    want = _dense(layer, "encoder_decoder", rows, queries, keys)
    return Route(layer, rows, kv_cache, meta, "encoder_decoder", want)


def _without_cross_tables(meta):
    empty = torch.zeros(len(meta.seq_lens), 0, dtype=torch.int32)
    return AttentionMetadata(**meta.asdict_zerocopy() | {"cross_block_tables": empty})


def _rows(num_queries, num_keys, dtype):
    sizes = ((num_queries, 4), (num_keys, 2), (num_keys, 2))
    return tuple(normal(i, *size, 16, dtype=dtype) for i, size in enumerate(sizes))


def _dense(layer, kind, rows, query_lens, key_lens):
    return dense(*rows, query_lens, key_lens, spec_of(layer, kind))

"""What each backend can do on this machine: feature x backend x attention type, from `explain`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._arrays.namespace import cdiv
from .._dispatch.backend import LACKS
from ..attention import explain
from ..batch.make_batch import make_batch
from ..batch.packed import packed_batch
from ..cache.kv_cache import KVCache
from ..spec import AttentionSpec
from ..testing.features import (
    ARRAYS,
    ATTENTION_TYPES,
    BATCHES,
    DTYPES,
    OPTIONS,
    PHASES,
    Sizes,
    arrays_of,
    kinds_of,
    spec_of,
    with_kinds,
)
from ..testing.problem import Problem
from ..testing.running import cache_of as problem_cache

NUM_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 64, 16
# Options named by what they set. Not causality: that follows from the type of attention.
SPECS = [name for name, fields in OPTIONS.items() if name in fields]
OF_DECODERS = ("prefill", "chunked prefill", "decode")
KV_HEADS = {"grouped queries": 2, "multi-query": 1}
FEATURES = ("plain", *OF_DECODERS, *SPECS, *KV_HEADS, "lse", "batch_invariant", *DTYPES)


class Request(NamedTuple):
    """One attention call, described by lengths and options; `call` makes its arrays."""

    feature: str
    attn_type: str
    lengths: tuple[tuple[int, int], ...]
    paged: bool
    spec: AttentionSpec
    num_kv_heads: int
    dtype: str
    return_lse: bool
    arrays: tuple[str, ...]
    cache: tuple[tuple[str, Any], ...] = ()
    batch_invariant: bool = False


class Cell(NamedTuple):
    """One answer of the table: no reasons means yes."""

    request: Request
    backend: str
    reasons: list[str]


def requests() -> list[Request]:
    """Every feature with every type of attention that has it."""
    return [
        request(feature, attn_type)
        for feature in FEATURES
        for attn_type, kind in ATTENTION_TYPES.items()
        if feature not in PHASES or feature in kind.phases
        if feature not in BATCHES or attn_type == "decoder"
    ]


def request(feature: str, attn_type: str) -> Request:
    kind = ATTENTION_TYPES[attn_type]
    options = feature if feature in OPTIONS else "plain"
    return Request(
        feature,
        attn_type,
        PHASES[feature if feature in PHASES else kind.phases[-1]],
        kind.paged,
        spec_of(options, NUM_HEADS, causal=attn_type == "decoder"),
        KV_HEADS.get(feature, NUM_HEADS),
        feature if feature in DTYPES else "bfloat16",
        feature == "lse",
        arrays_of(options),
        tuple(kinds_of(options).items()),
        feature == "batch_invariant",
    )


def call(request: Request, normal: Callable = jnp.zeros) -> tuple:
    """query, cache, batch and spec of a request; `normal(shape, dtype)` makes the values."""
    query_lens, key_lens = zip(*request.lengths, strict=True)
    rows = (request.num_kv_heads, HEAD_DIM)
    query = normal((sum(query_lens), NUM_HEADS, HEAD_DIM), request.dtype)
    if request.paged:
        counts = [cdiv(n, BLOCK_SIZE) for n in key_lens]
        tables = [list(range(sum(counts[:s]), sum(counts[: s + 1]))) for s in range(len(counts))]
        drafts = {"parents": [-1] * len(query)} if "parents" in dict(request.cache) else {}
        options = {"key_lens": key_lens, "block_size": BLOCK_SIZE, **drafts}
        batch = make_batch(query_lens, None, tables, **options)
        shape = (sum(counts), BLOCK_SIZE, *rows)
    else:
        starts = jnp.cumsum(jnp.array((0, *query_lens)))
        batch = packed_batch(len(query), starts, starts, max(query_lens), max(key_lens))
        shape = (sum(key_lens), 1, *rows)
    return query, _cache(request, query, shape, normal), batch, request.spec


def _cache(request: Request, query, shape: tuple[int, ...], normal: Callable) -> KVCache:
    """A quantised one has per-token scales or none: those of layers come with each call."""
    kinds = dict(request.cache)
    dtype = None if "token_scales" in kinds else kinds.pop("cache_dtype", None)
    plane = np.asarray(normal((*shape[:3], HEAD_DIM), request.dtype))
    problem = Problem(np.asarray(query), plane, plane, [], [], [], request.spec)
    cache = problem_cache(with_kinds(problem, kinds))
    if dtype is None:
        return cache
    return cache.with_planes(*(plane.astype(dtype) for plane in cache.planes))


def keywords(request: Request, normal: Callable = jnp.zeros) -> dict:
    """The keyword arguments of a request."""
    num_tokens, max_keys = (sum(lens) for lens in zip(*request.lengths, strict=True))
    num_seqs, num_kv_heads = len(request.lengths), request.num_kv_heads
    sizes = Sizes(num_tokens, NUM_HEADS, max_keys, num_seqs, num_kv_heads, max_keys)
    arrays = {}
    for name in request.arrays:
        option = ARRAYS[name]
        arrays[name] = option.as_given(normal(option.shape(sizes), option.dtype))
    flags = {"return_lse": request.return_lse, "batch_invariant": request.batch_invariant}
    return flags | arrays


def cells(explain: Callable = explain) -> list[Cell]:
    """All cells of the table: what `explain` answers to each request."""
    return [
        Cell(request, backend, reasons)
        for request in requests()
        for backend, reasons in explain(*call(request), **keywords(request)).items()
    ]


def grouped(cells: Sequence[Cell]) -> tuple[list[tuple[str, ...]], dict[str, int]]:
    """The table for a screen: rows of texts with a heading, and the numbers of the reasons.

    Features with the same answers share a row, and backends that refuse everything have no column.
    A feature works partly where some types of attention are refused. That a backend knows nothing
    of an option is no reason with a number.

    >>> rows, notes = grouped([Cell(request("lse", "decoder"), "xla", []),
    ...                        Cell(request("lse", "encoder"), "xla", ["no time"]),
    ...                        Cell(request("lse", "decoder"), "ipex", ["no lse"])])
    >>> rows, notes
    ([('feature', 'xla'), ('lse', 'partly 1')], {'no time': 1})
    """
    backends = [*dict.fromkeys(cell.backend for cell in cells if not cell.reasons)]
    notes: dict[str, int] = {}
    by_answers: dict[tuple[str, ...], list[str]] = {}
    for feature in dict.fromkeys(cell.request.feature for cell in cells):
        asked = [cell for cell in cells if cell.request.feature == feature]
        answers = tuple(_answer([c for c in asked if c.backend == b], notes) for b in backends)
        by_answers.setdefault(answers, []).append(feature)
    rows = [(", ".join(features), *answers) for answers, features in by_answers.items()]
    return [("feature", *backends), *rows], notes


def _answer(cells: Sequence[Cell], notes: dict[str, int]) -> str:
    """What one backend answers for one feature."""
    refused = [cell for cell in cells if cell.reasons]
    if not refused:
        return "yes"
    reasons = {reason: None for cell in refused for reason in cell.reasons}
    told = [reason for reason in reasons if not reason.endswith(LACKS)]
    numbers = ",".join(str(notes.setdefault(reason, len(notes) + 1)) for reason in told)
    return f"{'no' if len(refused) == len(cells) else 'partly'} {numbers}".strip()

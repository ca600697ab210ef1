"""What each backend can do on this machine: feature x backend x attention type, from `explain`."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from .attention import explain
from .cache import KVCache
from .features import ATTENTION_TYPES, DTYPES, OPTIONS, PHASES, arrays_of, spec_of
from .make_batch import make_batch
from .packed import packed_batch
from .ragged import cdiv
from .spec import AttentionSpec

NUM_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 64, 16
# Options that set one field. Not causality: that follows from the type of attention.
SPECS = [name for name, fields in OPTIONS.items() if list(fields) == [name]]
OF_DECODERS = ("prefill", "chunked prefill", "decode")
KV_HEADS = {"grouped queries": 2, "multi-query": 1}
FEATURES = ("plain", *OF_DECODERS, *SPECS, *KV_HEADS, "lse", *DTYPES)


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
    cache_dtype: str | None


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
        OPTIONS[options].get("cache_dtype"),
    )


def call(request: Request, normal: Callable = jnp.zeros) -> tuple:
    """query, cache, batch and spec of a request; `normal(shape, dtype)` makes the values."""
    query_lens, key_lens = zip(*request.lengths, strict=True)
    rows = (request.num_kv_heads, HEAD_DIM)
    query = normal((sum(query_lens), NUM_HEADS, HEAD_DIM), request.dtype)
    if request.paged:
        counts = [cdiv(n, BLOCK_SIZE) for n in key_lens]
        tables = [list(range(sum(counts[:s]), sum(counts[: s + 1]))) for s in range(len(counts))]
        batch = make_batch(query_lens, None, tables, key_lens=key_lens, block_size=BLOCK_SIZE)
        shape = (sum(counts), BLOCK_SIZE, *rows)
    else:
        starts = jnp.cumsum(jnp.array((0, *query_lens)))
        batch = packed_batch(len(query), starts, starts, max(query_lens), max(key_lens))
        shape = (sum(key_lens), 1, *rows)
    return (
        query,
        KVCache(*(_plane(normal(shape, request.dtype), request.cache_dtype) for _ in range(2))),
        batch,
        request.spec,
    )


def _plane(plane, cache_dtype):
    return plane if cache_dtype is None else plane.astype(cache_dtype)


def keywords(request: Request, normal: Callable = jnp.zeros) -> dict:
    """The keyword arguments of a request."""
    num_tokens, max_keys = (sum(lens) for lens in zip(*request.lengths, strict=True))
    shapes = {"sinks": (NUM_HEADS,), "bias": (num_tokens, 1, max_keys)}
    arrays = {name: normal(shapes[name], "float32") for name in request.arrays}
    return {"return_lse": request.return_lse} | arrays


def cells(explain: Callable = explain) -> list[Cell]:
    """All cells of the table: what `explain` answers to each request."""
    return [
        Cell(request, backend, reasons)
        for request in requests()
        for backend, reasons in explain(*call(request), **keywords(request)).items()
    ]


def render(cells: Sequence[Cell]) -> str:
    """The table as text: a row for each request, a column for each backend, then the reasons.

    >>> print(render([Cell(request("lse", "decoder"), "xla", []),
    ...               Cell(request("lse", "decoder"), "ipex", ["it gives no lse"])]))
    feature  attention  xla  ipex
    lse      decoder    yes  no 1
    <BLANKLINE>
    1  it gives no lse
    """
    backends = dict.fromkeys(cell.backend for cell in cells)
    notes: dict[str, int] = {}
    rows: dict[tuple, dict] = {}
    for cell in cells:
        row = rows.setdefault((cell.request.feature, cell.request.attn_type), {})
        row[cell.backend] = _answer(cell.reasons, notes)
    lines = [
        (*names, *(row.get(backend, "") for backend in backends)) for names, row in rows.items()
    ]
    text = _aligned([("feature", "attention", *backends), *lines])
    return "\n".join(
        [*text, *([""] if notes else []), *(f"{i}  {note}" for note, i in notes.items())]
    )


def _answer(reasons, notes):
    numbers = sorted(notes.setdefault(reason, len(notes) + 1) for reason in reasons)
    return f"no {','.join(map(str, numbers))}" if numbers else "yes"


def _aligned(rows):
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]

"""Hypothesis strategies: lengths, tables and values vary freely, shapes and specs hardly.

A program is compiled for each shape and spec, so these are drawn from short tables.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (teaches NumPy the name bfloat16)
import numpy as np

from .. import AttentionSpec, BackendUnavailableError, alibi_slopes
from .._arrays.namespace import cdiv
from . import features, harness
from .features import OPTIONS, arrays_of, kinds_of, spec_of
from .problem import Problem
from .random_problems import random_problem

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise BackendUnavailableError(
        "pagedattn.testing.strategies needs hypothesis, which is not installed: "
        "pip install 'pagedattn[testing]'"
    ) from error

DTYPES = tuple(np.dtype(name) for name in features.DTYPES)
POISONS = (np.nan, np.inf, -np.inf)
GARBAGE = (-1, 0, 1_000_000, -7)  # what unused table entries may hold


class Bucket(NamedTuple):
    """The static shapes of one family of problems."""

    num_tokens: int
    num_seqs: int
    max_blocks: int
    num_blocks: int
    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_query_len: int


# The first has the shapes of `check_backend`'s problems, and so their programs.
BUCKETS = (
    Bucket(harness.NUM_TOKENS, harness.NUM_SEQS, 10, 51, 4, 4, 2, 16, harness.MAX_QUERY_LEN),
    Bucket(12, 4, 5, 23, 5, 3, 1, 24, 12),
)
KINDS = ("prefill", "chunk", "decode", "empty query", "padding")


class Options(NamedTuple):
    """The options of a call: its spec, the names of its arrays, and the kind of cache and batch.

    The latter two are of `features.ARRAYS` and `features.KINDS`.
    """

    spec: AttentionSpec
    arrays: tuple[str, ...] = ()
    cache: Mapping[str, Any] | None = None


def options_table(num_heads: int) -> dict[str, Options]:
    """Named options that between them use every one, alone and together, and some edges."""
    return {name: _options(name, num_heads) for name in OPTIONS} | {
        "sliding_window=1": Options(AttentionSpec(sliding_window=1)),
        "standard alibi_slopes": Options(AttentionSpec(alibi_slopes=alibi_slopes(num_heads))),
    }


def _options(name: str, num_heads: int) -> Options:
    return Options(spec_of(name, num_heads), arrays_of(name), kinds_of(name))


def options(num_heads: int) -> st.SearchStrategy[Options]:
    """One of `options_table`."""
    return st.sampled_from(list(options_table(num_heads).values()))


def dtypes() -> st.SearchStrategy[Any]:
    """One of the dtypes that every backend should take."""
    return st.sampled_from(DTYPES)


def poisons() -> st.SearchStrategy[float]:
    """What may be where no query looks."""
    return st.sampled_from(POISONS)


def seeds() -> st.SearchStrategy[int]:
    """Seeds for numpy: Hypothesis shrinks one number, not all values of a problem."""
    return st.integers(0, 2**32 - 1)


@st.composite
def lengths(draw: st.DrawFn, bucket: Bucket, kinds: Sequence[str] = KINDS) -> list[tuple[int, int]]:
    """`(query_len, seq_len)` of every sequence of the bucket, a ragged mix of `kinds`."""
    room = bucket.max_blocks * bucket.block_size
    left, lens = bucket.num_tokens, []
    for _ in range(bucket.num_seqs):
        most = min(left, bucket.max_query_len)
        query_len, context_len = draw(one_length(draw(st.sampled_from(kinds)), most, room))
        left -= query_len
        lens.append((query_len, context_len + query_len))
    return lens


def one_length(kind: str, most: int, room: int) -> st.SearchStrategy[tuple[int, int]]:
    """`(query_len, context_len)` with at most `most` new tokens and `room` keys."""
    ranges = {
        "prefill": ((min(1, most), most), (0, 0)),
        "chunk": ((min(1, most), most), (1, room - most)),
        "decode": ((min(1, most), min(1, most)), (0, room - 1)),
        "empty query": ((0, 0), (0, room)),
        "padding": ((0, 0), (0, 0)),
    }
    query, context = ranges[kind]
    return st.tuples(st.integers(*query), st.integers(*context))


@st.composite
def cross_lengths(draw: st.DrawFn, bucket: Bucket) -> list[tuple[int, int]]:
    """Like `lengths`, with key lengths that do not depend on the query lengths."""
    left, lens = bucket.num_tokens, []
    for _ in range(bucket.num_seqs):
        query_len = draw(st.integers(0, min(left, bucket.max_query_len)))
        left -= query_len
        lens.append((query_len, draw(st.integers(0, bucket.max_blocks * bucket.block_size))))
    return lens


@st.composite
def tables(
    draw: st.DrawFn, lens: Sequence[tuple[int, int]], bucket: Bucket, *, share: bool = True
) -> np.ndarray:
    """int32 `[num_seqs, max_blocks]`: shuffled ids, shared prefixes, garbage past the used part.

    Shared blocks are wholly in the context of both sequences, so neither writes to them.
    """
    rng = np.random.default_rng(draw(seeds()))
    size = bucket.block_size
    used = [cdiv(seq_len, size) for _, seq_len in lens]
    garbage = draw(st.sampled_from(GARBAGE))
    rows = np.full((len(lens), bucket.max_blocks), garbage, np.int32)
    ids = iter(rng.permutation(bucket.num_blocks))
    for s, n in enumerate(used):
        rows[s, :n] = [next(ids) for _ in range(n)]
        if share and s and draw(st.booleans()):
            donor = draw(st.integers(0, s - 1))
            common = max(0, min(n - q for q, n in (lens[s], lens[donor]))) // size
            rows[s, :common] = rows[donor, :common]
    return rows


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    bucket: Bucket | None = None,
    spec: AttentionSpec | None = None,
    arrays: Sequence[str] = (),
    cache: Mapping[str, Any] | None = None,
    dtype: Any = None,
    kinds: Sequence[str] = KINDS,
    cross: bool = False,
    poison: bool = True,
    share: bool = True,
) -> Problem:
    """A whole attention call; what is not given is drawn.

    Args:
        bucket: static shapes, one of `BUCKETS` by default.
        spec, arrays, cache: drawn from `options` if there is no spec.
        dtype: drawn from `dtypes` by default.
        kinds: the kinds of sequences, from `KINDS`; without prefills and chunks `max_query_len`
            is 1, as in a decode step.
        cross: key lengths independent of query lengths.
        poison: put NaN or infinities in all that no query sees.
        share: let sequences share the blocks of a common prefix.
    """
    bucket = draw(st.sampled_from(BUCKETS)) if bucket is None else bucket
    if spec is None:
        spec, arrays, cache = draw(options(bucket.num_heads))
    dtype = draw(dtypes()) if dtype is None else dtype
    lens = draw(cross_lengths(bucket) if cross else lengths(bucket, kinds))
    query_lens, seq_lens = ([length[i] for length in lens] for i in (0, 1))
    longest = 1 if not cross and not {"prefill", "chunk"} & set(kinds) else bucket.max_query_len
    return random_problem(
        query_lens,
        seq_lens,
        spec,
        num_heads=bucket.num_heads,
        num_kv_heads=bucket.num_kv_heads,
        head_dim=bucket.head_dim,
        block_size=bucket.block_size,
        num_blocks=bucket.num_blocks,
        pad_tokens=bucket.num_tokens,
        dtype=dtype,
        poison=draw(poisons()) if poison else None,
        block_tables=draw(tables(lens, bucket, share=share)),
        max_query_len=longest,
        arrays=arrays,
        seed=draw(seeds()),
        **(cache or {}),
    )


def any_phase(**kwargs: Any) -> st.SearchStrategy[Problem]:
    """Problems of every phase: mixed batches, decode steps and cross attention."""
    decode = problems(kinds=("decode", "empty query", "padding"), **kwargs)
    return st.one_of(problems(**kwargs), decode, problems(cross=True, **kwargs))

"""Ragged batches that the field tests with: lengths, heads, head dims, block sizes, windows.

Each case is one call in jit, held to the oracle, poisoned wherever no query looks. Long lengths are
kept with few heads, and many heads with short lengths, so that the file runs on two slow cores.
"""

import functools
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from cases import run

from pagedattn import AttentionSpec, alibi_slopes
from pagedattn.testing import assert_attention_close, expect, random_problem

BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32


class Grid(NamedTuple):
    """One call: (query_len, seq_len) of each sequence, and its sizes."""

    lens: list[tuple[int, int]]
    heads: tuple[int, int]
    head_dim: int
    block_size: int
    dtype: Any = F32
    spec: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    seed: int = 0


def slopes(heads, seed=7):
    """Normal slopes: negative ones occur."""
    return tuple(np.random.default_rng(seed).standard_normal(heads).tolist())


def random_lens(count, longest, seed):
    """Decode lengths in [1, longest], the last one the longest."""
    lens = np.random.default_rng(seed).integers(1, longest, count - 1).tolist()
    return [(1, n) for n in [*lens, longest]]


DECODE = [(1, 213), (1, 1), (1, 312), (1, 7), (1, 7812)]
PREFILL = [(2345, 2345), (5, 5), (3, 16), (134, 5131)]
MIXED = [(992, 2456), (1, 1234), (98, 1145), (1, 4162), (2345, 2345)]
ENCODER = [(n, n) for n in (1, 678, 145, 36)]
SHORT_MIXED = [(99, 245), (1, 123), (9, 114), (1, 416), (234, 234)]  # MIXED, a tenth as long


def chunks(count, seed, query=128, context=256):
    """Query and context lengths up to a bound; one sequence decodes."""
    rng = np.random.default_rng(seed)
    queries = [*rng.integers(1, query, count - 1).tolist(), 1]
    return [(q, q + int(c)) for q, c in zip(queries, rng.integers(0, context, count), strict=True)]


def edges(size):
    """Lengths at the edges of a block, as decode, as prefill and as a chunk; empty ones too."""
    lens = sorted({1, max(1, size - 1), size, size + 1})
    decode = [(1, n) for n in lens]
    return [*decode, *((n, n) for n in lens), *((2, n + 2) for n in lens), (0, 0), (0, size)]


GRIDS = {
    "decode": Grid(DECODE, (4, 4), 96, 128),
    "decode, bf16, window": Grid(DECODE, (8, 2), 128, 96, BF16, {"sliding_window": 256}),
    "decode, f16, nine heads": Grid(DECODE, (9, 3), 96, 128, F16),
    "decode, cap": Grid(DECODE, (8, 2), 96, 128, BF16, {"logits_soft_cap": 50.0}),
    "decode, alibi": Grid(DECODE, (4, 4), 96, 128, BF16, {"alibi_slopes": alibi_slopes(4)}),
    "least cap": Grid([(1, 40), (3, 9)], (4, 2), 24, 16, F32, {"logits_soft_cap": 1e-30}),
    "largest cap": Grid([(1, 40), (3, 9)], (4, 2), 24, 16, F32, {"logits_soft_cap": 1e30}),
    "prefill": Grid(PREFILL, (2, 1), 128, 128, BF16),
    "mixed": Grid(MIXED, (2, 2), 96, 128, F32, {"sliding_window": 256}),
    "mixed, nine heads": Grid(SHORT_MIXED, (9, 3), 128, 96, BF16),
    "mixed, wide head": Grid(SHORT_MIXED, (4, 4), 512, 128, F32),
    "mixed, cap": Grid(SHORT_MIXED, (8, 2), 96, 128, BF16, {"logits_soft_cap": 50.0}),
    "mixed, alibi": Grid(SHORT_MIXED, (8, 2), 80, 48, BF16, {"alibi_slopes": slopes(8)}),
    "encoder": Grid(ENCODER, (4, 4), 96, 128, F32, {"causal": False}),
    "encoder, window": Grid(
        ENCODER, (4, 4), 96, 128, BF16, {"causal": False, "sliding_window": 256}
    ),
    "more queries than keys": Grid([(40, 5), (3, 9), (7, 0)], (64, 1), 16, 16),
    "far more queries than keys": Grid([(600, 5), (3, 9)], (2, 2), 16, 16),
    "cross": Grid([(300, 40), (3, 600), (1, 700)], (4, 2), 80, 32, F32, {"causal": False}),
    "cross, window": Grid(
        [(300, 40), (3, 600), (1, 700)], (4, 2), 80, 32, F32, {"causal": False, "sliding_window": 9}
    ),
    "many heads": Grid(random_lens(7, 400, 1), (40, 40), 64, 16, F16),
    "many heads, alibi": Grid(
        random_lens(7, 400, 2), (64, 8), 80, 32, BF16, {"alibi_slopes": slopes(64)}
    ),
    "head_dim 112": Grid(random_lens(7, 400, 3), (8, 1), 112, 16, F16),
    "head_dim 120": Grid(random_lens(7, 400, 4), (8, 8), 120, 32, BF16),
    "head_dim 256": Grid(random_lens(7, 400, 5), (8, 2), 256, 16, F32),
    "prefix, one kv head": Grid(chunks(10, 1), (8, 1), 128, 32, F16),
    "prefix, head_dim 24": Grid(chunks(10, 2), (8, 8), 24, 32, F16, {"sliding_window": 16}),
    "prefix, head_dim 96": Grid(chunks(10, 3), (8, 1), 96, 32, F16, {"sliding_window": 64}),
    "prefix, window 128": Grid(chunks(10, 4), (8, 2), 24, 32, BF16, {"sliding_window": 128}),
    "prefix, window 2048": Grid(chunks(10, 5), (8, 2), 96, 32, F32, {"sliding_window": 2048}),
    "prefix, alibi": Grid(chunks(10, 6), (8, 4), 24, 32, F32, {"alibi_slopes": alibi_slopes(8)}),
    "edges of 16": Grid(edges(16), (4, 2), 24, 16),
    "edges of 96": Grid(edges(96), (4, 2), 80, 96),
    "edges of 1": Grid(edges(1), (4, 2), 8, 1),
    "one token, one block": Grid([(1, 1)], (1, 1), 1, 1),
    "all empty queries": Grid([(0, 0), (0, 17), (0, 16)], (4, 2), 16, 16),
    "seventy-one heads": Grid(random_lens(3, 200, 6), (71, 1), 64, 16, BF16),
}


def problem_of(grid: Grid):
    lens = [list(n) for n in zip(*grid.lens, strict=True)]
    return random_problem(
        *lens,
        AttentionSpec(**grid.spec),
        num_heads=grid.heads[0],
        num_kv_heads=grid.heads[1],
        head_dim=grid.head_dim,
        block_size=grid.block_size,
        dtype=grid.dtype,
        seed=grid.seed,
    )


@functools.cache
def solved(name):
    """A problem of the table and its answer, for all backends."""
    problem = problem_of(GRIDS[name])
    return problem, expect(problem)


# The rest is held to the oracle as it is compiled faster.
OPTIMISED = ("decode, bf16, window", "mixed", "encoder, window")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.optimised] * (n in OPTIMISED)) for n in GRIDS]
)
def test_grid(backend, name):
    problem, want = solved(name)
    assert_attention_close(*run(problem, backend), want, name=backend)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("causal", [True, False])
def test_windows_at_the_edges_of_a_block(backend, window, causal):
    lens = [(1, 17), (1, 33), (17, 33), (16, 16), (1, 1), (3, 40), (2, 15)]
    spec = {"sliding_window": window, "causal": causal}
    problem = problem_of(Grid(lens, (4, 2), 24, 16, F32, spec))
    assert_attention_close(*run(problem, backend), problem, name=backend)


def test_repeated_blocks(backend):
    """Sequences that share blocks, and one that holds the same block twice, out of order."""
    tables = [[5, 2, 7, 1], [2, 5, 5, 6], [5, 2, 7, 4]]
    problem = random_problem(
        [1, 1, 3],
        [60, 49, 61],
        AttentionSpec(),
        block_size=16,
        num_blocks=8,
        block_tables=tables,
    )
    assert_attention_close(*run(problem, backend), problem, name=backend)


ENCODER_DECODER = [
    # num_heads, head_dim, batch, seed
    (1, 64, 1, 0),
    (16, 64, 4, 1),
    (2, 256, 16, 2),
]


@pytest.mark.parametrize(("num_heads", "head_dim", "count", "seed"), ENCODER_DECODER)
@pytest.mark.parametrize("step", ["encoder", "decoder prefill", "cross prefill", "cross decode"])
def test_encoder_decoder(backend, num_heads, head_dim, count, seed, step):
    """Tables that count downward and end in ten columns of zeros, a legal block id."""
    rng = np.random.default_rng(seed)
    decoder, encoder = rng.integers(1, 128, (2, count)).tolist()
    lens = {
        "encoder": (encoder, encoder),
        "decoder prefill": (decoder, decoder),
        "cross prefill": (decoder, encoder),
        "cross decode": ([1] * count, encoder),
    }[step]
    tables = np.zeros((count, 8 + 10), int)
    tables[:, :8] = np.arange(8 * count, 0, -1).reshape(count, 8)
    problem = random_problem(
        *lens,
        AttentionSpec(causal=step == "decoder prefill"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        block_size=16,
        num_blocks=8 * count + 1,
        block_tables=tables,
        seed=seed,
    )
    assert_attention_close(*run(problem, backend), problem, name=backend)

"""Small calls of the Mosaic kernels, to be interpreted: shapes, and lengths within them.

Tracing takes 5 of a call's 8 seconds. Shapes and specs are compiled for, lengths are not: so each
case has one program, and runs it for lengths of its own and for lengths that Hypothesis draws.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hard_problems import HARDER, with_negative_scales, with_scales_apart
from hypothesis import strategies as st

from pagedattn import AttentionSpec
from pagedattn._dispatch import emulate
from pagedattn._dispatch.backend import Backend
from pagedattn._dispatch.call import call_of
from pagedattn.backends.mosaic.dense import launch as dense
from pagedattn.backends.mosaic.latents import launch as latents
from pagedattn.testing import Problem, assert_attention_close, batch_of, cache_of, random_problem
from pagedattn.testing.random_problems import random_tables
from pagedattn.testing.strategies import Bucket, problems

BF16, F16 = ml_dtypes.bfloat16, np.float16
KERNELS = ("whole tiles", "cut keys", "latents")


class Case(NamedTuple):
    """`lengths` are pairs of query_lens and seq_lens; `sizes` are fields of a `Bucket`.

    The problem of the last lengths is solved again as each of `harder` has it.
    """

    kernel: str
    lengths: tuple[tuple[list[int], list[int]], ...]
    sizes: dict[str, Any]
    programs: int
    spec: AttentionSpec = AttentionSpec()
    dtype: Any = BF16
    parents: bool = False  # whether new tokens are drafts that branch
    cache_dtype: str | None = None  # of eight bits
    token_scales: bool = False
    harder: tuple[Callable[[Problem], Problem], ...] = ()

    @property
    def bucket(self) -> Bucket:
        """Static shapes, by default of one head, and of blocks for all that tables can hold."""
        num_seqs = len(self.lengths[0][0])
        sizes = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 64, "num_seqs": num_seqs}
        sizes |= self.sizes
        return Bucket(num_blocks=num_seqs * sizes["max_blocks"] + 1, **sizes)

    @property
    def cache(self) -> dict[str, Any]:
        kinds = {"parents": self.parents, "cache_dtype": self.cache_dtype}
        kinds["token_scales"] = self.token_scales
        if self.kernel == "latents":
            kinds |= {"value_dim": 512, "latent": True}
        return {name: kind for name, kind in kinds.items() if kind}


def sizes(num_tokens, max_query_len, block_size, max_blocks, **others):
    fixed = {"num_tokens": num_tokens, "max_query_len": max_query_len}
    return fixed | {"block_size": block_size, "max_blocks": max_blocks} | others


def latent_sizes(*args, num_heads=64):
    return sizes(*args, num_heads=num_heads, head_dim=576)


ALIBI = (0.5, -0.25)
CASES = {
    "whole tiles": Case(
        "whole tiles",
        (([136, 3, 0, 20], [150, 70, 12, 20]), ([137, 0, 1, 0], [150, 0, 1, 0])),
        sizes(160, 144, 64, 4),
        programs=2,
    ),
    "rings turn": Case(
        "whole tiles",
        (([136, 3, 0, 20], [400, 70, 12, 20]),),
        sizes(160, 144, 32, 13),
        programs=1,
    ),
    "many tiles of a program": Case(
        "whole tiles",
        (([136, 136, 136, 136, 136], [140, 140, 140, 140, 140]),),
        sizes(680, 136, 64, 3),
        programs=1,
    ),
    "group of 4": Case(
        "whole tiles",
        (([40, 1, 9], [150, 33, 9]),),
        sizes(52, 40, 16, 10, num_heads=8, num_kv_heads=2),
        programs=2,
    ),
    "window, cap": Case(
        "whole tiles",
        (([136, 1], [300, 5]),),
        sizes(140, 136, 16, 20, head_dim=128),
        programs=2,
        spec=AttentionSpec(sliding_window=100, logits_soft_cap=3.0),
    ),
    "all keys": Case(
        "whole tiles",
        (([136, 3, 0, 20], [400, 70, 12, 20]), ([140, 0, 0, 0], [70, 0, 0, 0])),
        sizes(160, 144, 32, 13),
        programs=1,
        spec=AttentionSpec(causal=False),
    ),
    "all keys, alibi, 256": Case(
        "whole tiles",
        (([136], [70]),),
        sizes(136, 136, 16, 6, num_heads=2, num_kv_heads=2, head_dim=256),
        programs=2,
        spec=AttentionSpec(causal=False, alibi_slopes=ALIBI),
    ),
    "window both ways, 192": Case(
        "whole tiles",
        (([130, 6], [200, 90]),),
        sizes(140, 130, 128, 2, head_dim=192),
        programs=2,
        spec=AttentionSpec(causal=False, sliding_window=60),
        dtype=F16,
    ),
    "pages of 8": Case("whole tiles", (([136], [145]),), sizes(136, 136, 8, 20), programs=3),
    "pages of 256": Case(
        "whole tiles", (([136], [300]),), sizes(136, 136, 256, 2), programs=3, dtype=F16
    ),
    "cut decodes": Case(
        "cut keys",
        (([1, 1, 1], [300, 5, 130]),),
        sizes(4, 1, 16, 19, num_heads=2),
        programs=4,
    ),
    "cut chunks, window": Case(
        "cut keys",
        (([9, 0, 12], [300, 5, 530]),),
        sizes(22, 12, 32, 17, num_heads=4, num_kv_heads=2, head_dim=128),
        programs=5,
        spec=AttentionSpec(sliding_window=290),
    ),
    "cut, all keys, alibi, cap, 256": Case(
        "cut keys",
        (([8, 2], [200, 0]), ([3, 8], [1, 190])),
        sizes(16, 8, 16, 13, num_heads=2, num_kv_heads=2, head_dim=256),
        programs=6,
        spec=AttentionSpec(causal=False, alibi_slopes=ALIBI, logits_soft_cap=3.0),
        dtype=F16,
    ),
    "cut, pages of 8 for 7 heads": Case(
        "cut keys",
        (([1, 0, 1, 1], [280, 0, 9, 270]),),
        sizes(5, 1, 8, 36, num_heads=7),
        programs=3,
    ),
    "eight bits": Case(
        "whole tiles",
        (([136, 3, 0, 20], [400, 70, 12, 20]), ([137, 0, 1, 0], [150, 0, 1, 0])),
        sizes(160, 144, 32, 13, head_dim=128),
        programs=1,
        cache_dtype="int8",
        harder=tuple(HARDER.values()),
    ),
    "eight bits, window, group of 4": Case(
        "whole tiles",
        (([40, 1, 9], [150, 33, 9]),),
        sizes(52, 40, 128, 2, num_heads=8, num_kv_heads=2, head_dim=128),
        programs=2,
        spec=AttentionSpec(sliding_window=100),
        cache_dtype="float8_e4m3fn",
    ),
    "eight bits, cut keys": Case(
        "cut keys",
        (([1, 0, 12], [300, 5, 530]), ([8, 1, 1], [140, 130, 300])),
        sizes(22, 12, 16, 34, num_heads=4, num_kv_heads=2, head_dim=128),
        programs=5,
        cache_dtype="float8_e5m2",
    ),
    "per-token scales": Case(
        "whole tiles",
        (([136, 3, 0, 20], [400, 70, 12, 20]), ([137, 0, 1, 0], [150, 0, 1, 0])),
        sizes(160, 144, 32, 13, head_dim=128, num_heads=2, num_kv_heads=2),
        programs=1,
        cache_dtype="int8",
        token_scales=True,
        harder=(with_scales_apart, with_negative_scales),
    ),
    "per-token scales, window, pages of 256": Case(
        "whole tiles",
        (([40, 1, 9], [150, 33, 9]),),
        sizes(52, 40, 256, 1, num_heads=8, num_kv_heads=2, head_dim=128),
        programs=2,
        spec=AttentionSpec(sliding_window=100, logits_soft_cap=3.0),
        cache_dtype="float8_e4m3fn",
        token_scales=True,
    ),
    "per-token scales, cut keys": Case(
        "cut keys",
        (([1, 0, 12], [300, 5, 530]), ([8, 1, 1], [140, 130, 300])),
        sizes(22, 12, 16, 34, num_heads=4, num_kv_heads=2, head_dim=128),
        programs=5,
        spec=AttentionSpec(sliding_window=290),
        cache_dtype="int8",
        token_scales=True,
    ),
    "trees": Case(
        "whole tiles",
        (([136, 3, 0, 20], [400, 70, 12, 20]), ([67, 1, 70, 8], [200, 1, 135, 103])),
        sizes(160, 144, 32, 13),
        programs=2,
        parents=True,
    ),
    "trees of 4 heads, window, alibi, cap": Case(
        "whole tiles",
        (([40, 1, 9], [150, 33, 9]), ([50, 0, 2], [155, 0, 2])),
        sizes(52, 50, 16, 10, num_heads=4),
        programs=2,
        spec=AttentionSpec(sliding_window=12, logits_soft_cap=3.0, alibi_slopes=2 * ALIBI),
        parents=True,
    ),
    "cut trees": Case(
        "cut keys",
        (([9, 0, 12], [300, 5, 530]), ([12, 8, 1], [140, 130, 300])),
        sizes(22, 12, 32, 17, num_heads=4, num_kv_heads=2, head_dim=128),
        programs=5,
        parents=True,
    ),
    "cut trees, window, alibi, 256": Case(
        "cut keys",
        (([40, 2], [200, 70]), ([3, 60], [3, 190])),
        sizes(64, 64, 16, 13, num_heads=2, num_kv_heads=2, head_dim=256),
        programs=6,
        spec=AttentionSpec(sliding_window=20, alibi_slopes=ALIBI),
        dtype=F16,
        parents=True,
    ),
    "latents": Case(
        "latents",
        (([1, 1, 1], [300, 5, 130]),),
        latent_sizes(3, 1, 16, 19),
        programs=4,
        spec=AttentionSpec(scale=0.07),
    ),
    "latents, clusters of 2": Case(
        "latents",
        (([3, 0, 1], [200, 7, 0]),),
        latent_sizes(5, 3, 64, 4, num_heads=128),
        programs=6,
        spec=AttentionSpec(scale=0.07),
    ),
    "latents, all keys, pages of 8": Case(
        "latents",
        (([2, 1], [130, 300]),),
        latent_sizes(4, 2, 8, 38),
        programs=3,
        spec=AttentionSpec(causal=False, scale=0.07),
    ),
    "latents, 16 heads": Case(
        "latents",
        (([1, 1, 1], [300, 5, 130]),),
        latent_sizes(3, 1, 16, 19, num_heads=16),
        programs=4,
        spec=AttentionSpec(scale=0.07),
    ),
    "latents, 32 heads, pages of 64": Case(
        "latents",
        (([3, 0, 1], [200, 7, 0]),),
        latent_sizes(5, 3, 64, 4, num_heads=32),
        programs=3,
        spec=AttentionSpec(scale=-0.07, causal=False),
    ),
    "latents, 24 heads, pages of 8": Case(
        "latents",
        (([2, 1], [130, 700]),),
        latent_sizes(4, 2, 8, 88, num_heads=24),
        programs=6,
        spec=AttentionSpec(scale=0.07),
    ),
    "latents of one sequence": Case(
        "latents",
        (([1], [1650]),),
        latent_sizes(1, 1, 32, 52),
        programs=7,
        spec=AttentionSpec(scale=0.07),
    ),
    "latents of one sequence, 8 heads": Case(
        "latents",
        (([1], [1650]),),
        latent_sizes(1, 1, 32, 52, num_heads=8),
        programs=7,
        spec=AttentionSpec(scale=0.07),
    ),
    "latents of eight bits, per-token scales": Case(
        "latents",
        (([1, 0, 1, 2], [300, 0, 5, 700]),),
        latent_sizes(6, 2, 16, 44, num_heads=16),
        programs=4,
        spec=AttentionSpec(scale=0.07),
        cache_dtype="float8_e4m3fn",
        token_scales=True,
        harder=(with_scales_apart,),
    ),
    "latents of int8, per-token scales, 64 heads": Case(
        "latents",
        (([1, 1], [700, 90]),),
        latent_sizes(3, 1, 64, 11, num_heads=64),
        programs=3,
        spec=AttentionSpec(scale=-0.07),
        cache_dtype="int8",
        token_scales=True,
    ),
    "latents of eight bits, 8 heads": Case(
        "latents",
        (([1, 1], [700, 90]),),
        latent_sizes(3, 1, 8, 88, num_heads=8),
        programs=3,
        spec=AttentionSpec(scale=0.07),
        cache_dtype="float8_e5m2",
        harder=tuple(HARDER[name] for name in ("great column", "great queries", "tiny queries")),
    ),
    "latents of eight bits, logits far apart": Case(
        "latents",
        (([1, 1], [700, 330]),),
        latent_sizes(3, 1, 16, 44, num_heads=8),
        programs=2,
        spec=AttentionSpec(scale=1.0),
        cache_dtype="float8_e4m3fn",
        token_scales=True,
    ),
    "latents, pages of 256": Case(
        "latents",
        (([1, 1], [270, 500]),),
        latent_sizes(2, 1, 256, 2, num_heads=128),
        programs=4,
    ),
}


def own_problems(case: Case):
    """Those of the case's lengths, with tables as wide as those that are drawn."""
    bucket, rng = case.bucket, np.random.default_rng(0)
    for query_lens, seq_lens in case.lengths:
        blocks = [-(-n // bucket.block_size) for n in seq_lens]
        tables = np.full((bucket.num_seqs, bucket.max_blocks), -1, np.int32)
        for row, ids in zip(tables, random_tables(rng, blocks, bucket.num_blocks), strict=True):
            row[: len(ids)] = ids
        problem = random_problem(
            query_lens,
            seq_lens,
            case.spec,
            num_heads=bucket.num_heads,
            num_kv_heads=bucket.num_kv_heads,
            head_dim=bucket.head_dim,
            block_size=bucket.block_size,
            num_blocks=bucket.num_blocks,
            pad_tokens=bucket.num_tokens,
            max_query_len=bucket.max_query_len,
            dtype=case.dtype,
            block_tables=tables,
            **case.cache,
        )
        yield problem
    yield from (harder(problem) for harder in case.harder)


def drawn_problems(case: Case):
    """Of any lengths, tables and values: all are of one program."""
    fixed = {"bucket": case.bucket, "spec": case.spec, "dtype": case.dtype, "cache": case.cache}
    return st.one_of(problems(**fixed), problems(**fixed, cross=True))


def check(case: Case, problem: Problem):
    """The kernel agrees with the oracle, without a race, and is the one that is named."""
    from mosaic_interpreter import interpreted

    arrays = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    call = call_of(*arrays, problem.spec, return_lse=True)
    kernel = latents if case.kernel == "latents" else dense
    config = kernel.config_of(call, case.programs)
    assert kernel is latents or (config.parts > 0) == (case.kernel == "cut keys")

    def run(call, *arrays):
        return interpreted(kernel.attend, call, *arrays, case.programs)

    backend = Backend("mosaic", frozenset(kernel.SUPPORTS), run)
    out, lse = emulate.attend(backend, call, *arrays, None, {})
    assert_attention_close(out, lse, problem, name="mosaic")


def check_all(case: Case, examples: int):
    """The case's own problems, then as many that are drawn, always the same ones."""
    for problem in own_problems(case):
        check(case, problem)
    if not examples:
        return

    @hypothesis.seed(0)
    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],  # a deadlock takes long to be noticed, let alone shrunk
        suppress_health_check=[*hypothesis.HealthCheck],
    )
    @hypothesis.given(problem=drawn_problems(case))
    def drawn(problem):
        check(case, problem)

    drawn()

"""Prompts and chunks of all kinds for the CPU's kernel, checked against the oracle."""

import jax.numpy as jnp
import numpy as np

from pagedattn import AttentionSpec, paged_attention
from pagedattn.backends import numba
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem

SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "block_size": 16}
CASES = {
    "prompt": ([300], [300], {}, {}),
    "chunks and decodes": ([129, 1, 100, 0, 5], [400, 300, 101, 0, 90], {}, {}),
    "window": ([290, 100], [600, 300], {"sliding_window": 100}, {}),
    "encoder": ([150, 100], [150, 100], {"causal": False}, {}),
    "keys fewer than queries": ([100, 140], [30, 7], {}, {}),
    "cross": ([170, 100], [300, 0], {"causal": False}, {}),
    "every option": (
        [140],
        [270],
        {"logits_soft_cap": 3.0, "alibi_slopes": (0.5, -0.25, 1.0, 0.0), "sliding_window": 130},
        {"arrays": ("bias", "sinks")},
    ),
    "a negative scale": ([100], [100], {"scale": -0.3}, {}),
    "a scale of 0": ([100], [100], {"scale": 0.0}, {}),
    "group of 3, tails": ([61], [97], {}, {"num_heads": 3, "num_kv_heads": 1, "head_dim": 40}),
    "small heads": ([101], [137], {}, {"head_dim": 7, "block_size": 5}),
    "latent": (
        [50],
        [120],
        {"scale": 0.1},
        {"num_heads": 8, "num_kv_heads": 1, "head_dim": 96, "value_dim": 72, "latent": True},
    ),
}


def problem_of(name: str, dtype: str = "bfloat16", **kinds):
    query_lens, seq_lens, options, sizes = CASES[name]
    sizes = SIZES | {"dtype": jnp.dtype(dtype)} | sizes | kinds
    return random_problem(query_lens, seq_lens, AttentionSpec(**options), **sizes)


def attend(problem, threads: int):
    arrays = jnp.asarray(problem.query), cache_of(problem), batch_of(problem), problem.spec
    beside = {
        name: array for name in ("bias", "sinks") if (array := getattr(problem, name)) is not None
    }
    beside = {name: jnp.asarray(array) for name, array in beside.items()}
    chosen = numba.with_threads(threads)
    return paged_attention(*arrays, backend=chosen, return_lse=True, **beside)


def check(problem, threads: int) -> None:
    assert_attention_close(*map(np.asarray, attend(problem, threads)), problem)


def check_all(threads: int, dtype: str = "bfloat16") -> None:
    for name in CASES:
        check(problem_of(name, dtype), threads)

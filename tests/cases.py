"""How the tests call the library: one problem in, numpy out."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedattn import AttentionSpec, KVCache
from pagedattn.testing import Problem, attend, batch_of, cache_of, random_problem

SIGNED = (0.7, -0.3, 0.05, -1.1)  # ALiBi slopes of four heads
SPECS = {
    "plain": AttentionSpec(),
    "scale": AttentionSpec(scale=0.6),
    "window": AttentionSpec(sliding_window=5),
    "soft cap": AttentionSpec(logits_soft_cap=1.5),
    "alibi": AttentionSpec(alibi_slopes=SIGNED),
    "not causal": AttentionSpec(causal=False),
    "all": AttentionSpec(scale=0.4, sliding_window=7, logits_soft_cap=2.0, alibi_slopes=SIGNED),
}


def run(problem: Problem, backend: str | None, mode: str = "jit") -> tuple[np.ndarray, np.ndarray]:
    """out and lse of a problem as float arrays of numpy; mode is "eager" or "jit"."""
    out, lse = attend(problem, backend=backend, jit=mode == "jit")
    return np.asarray(out), np.asarray(lse)


def mixed(spec: AttentionSpec = SPECS["plain"], **kwargs: Any) -> Problem:
    """Prefill, chunk, decode, an empty query and a padding sequence in one batch, two pad rows."""
    kwargs = {"pad_tokens": 20, "max_query_len": 16} | kwargs
    return random_problem([6, 7, 1, 0, 4, 0], [6, 19, 22, 9, 5, 0], spec, **kwargs)


def replace_spec(problem: Problem, **fields: Any) -> Problem:
    """The problem with some fields of its spec changed."""
    return problem.replace(spec=dataclasses.replace(problem.spec, **fields))


def random_cache(num_blocks=9, block_size=4, num_kv_heads=2, head_dim=8, dtype=np.float32, seed=0):
    """A cache of unit normal values."""
    rng = np.random.default_rng(seed)
    shape = num_blocks, block_size, num_kv_heads, head_dim
    return KVCache(*(jnp.asarray(rng.standard_normal(shape).astype(dtype)) for _ in range(2)))


def rows(num_tokens: int, cache: KVCache, seed: int = 1) -> tuple[jax.Array, jax.Array]:
    """New keys and values for a cache."""
    rng = np.random.default_rng(seed)
    shape = num_tokens, cache.num_kv_heads, cache.head_dim
    key, value = (jnp.asarray(rng.standard_normal(shape), cache.dtype) for _ in range(2))
    return key, value


def as_numpy(cache: Any) -> tuple[np.ndarray, np.ndarray]:
    """Copies of both halves of a cache, of JAX arrays or of torch tensors."""
    halves = (half.cpu() if hasattr(half, "cpu") else half for half in (cache.key, cache.value))
    key, value = (np.asarray(half).copy() for half in halves)
    return key, value


def good_call():
    """query, cache, batch, spec of a mixed problem: 6 sequences, 6 table columns, 20 tokens."""
    problem = mixed()
    return jnp.asarray(problem.query), cache_of(problem), batch_of(problem), problem.spec


def assert_words(error, words):
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, str(error.value)

"""Problems of given lengths, with random values and tables."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._arrays.namespace import cdiv
from .problem import Problem


def random_problem(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    spec: Any,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    num_blocks: int | None = None,
    pad_tokens: int | None = None,
    dtype: Any = np.float32,
    poison: float | None = np.nan,
    block_tables: Sequence[Sequence[int]] | np.ndarray | None = None,
    max_query_len: int | None = None,
    arrays: Sequence[str] = (),
    cache_dtype: Any = None,
    value_dim: int | None = None,
    latent: bool = False,
    seed: int = 0,
) -> Problem:
    """A problem with unit normal values and shuffled blocks, poisoned wherever no query looks.

    `num_blocks` defaults to three more than are needed; `pad_tokens` is the length of the token
    axis, by default without padding; `block_tables=None` draws tables without sharing; `arrays` are
    the options of `features.ARRAYS` that it has; `cache_dtype` quantises the caches, with a scale
    for each KV head of the keys, and one of the values; `value_dim` are the columns of the values,
    by default those of the keys, which hold them if it is a latent cache.

    Example:
        >>> from pagedattn import AttentionSpec
        >>> from pagedattn.testing import random_problem
        >>> random_problem([1, 3], [9, 3], AttentionSpec()).query.shape
        (4, 4, 16)
    """
    rng = np.random.default_rng(seed)
    blocks = [cdiv(int(n), block_size) for n in seq_lens]
    num_blocks = sum(blocks) + 3 if num_blocks is None else num_blocks
    if block_tables is None:
        block_tables = random_tables(rng, blocks, num_blocks)
    num_tokens = int(sum(query_lens)) if pad_tokens is None else pad_tokens
    pool, value_dim = (num_blocks, block_size, num_kv_heads), value_dim or head_dim
    shapes = (num_tokens, num_heads, head_dim), (*pool, head_dim), (*pool, value_dim)
    query, key, value = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    lens = list(query_lens), list(seq_lens)
    problem = Problem(query, key, value, block_tables, *lens, spec, max_query_len)
    problem = problem.replace(value_cache=None, value_dim=value_dim) if latent else problem
    problem = problem.replace(**{name: _MAKERS[name](rng, problem) for name in arrays})
    problem = problem if cache_dtype is None else quantised_problem(problem, cache_dtype)
    return problem if poison is None else problem.poisoned(poison)


def quantised_problem(problem: Problem, cache_dtype: Any) -> Problem:
    """The problem with caches of eight bits: what they hold is what they are said to hold."""
    dtype, heads = np.dtype(cache_dtype), problem.key_cache.shape[2]
    step = np.float32(0.01 if dtype == np.int8 else 0.1)
    scales = np.resize(np.array([3, 2], np.float32), heads) * step, np.asarray(5 * step)
    key = {"key_cache": _held(problem.key_cache, scales[0], dtype), "key_scale": scales[0]}
    if problem.value_cache is None:
        return problem.replace(**key)
    value = _held(problem.value_cache, scales[1], dtype)
    return problem.replace(**key, value_cache=value, value_scale=scales[1])


def _held(plane, scale, dtype):
    held = plane.astype(np.float32) / scale.reshape(-1, 1)
    return (np.rint(held) if dtype == np.int8 else held).clip(-127, 127).astype(dtype)


def random_sinks(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Sinks of the size of logits; of several heads, the last has none."""
    sinks = rng.standard_normal(problem.query.shape[1]).astype(np.float32)
    sinks[1:][-1:] = -np.inf
    return sinks


def random_bias(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """A bias for each head that hides a third of the keys, and from a tenth of the rows all."""
    num_tokens, num_heads, _ = problem.query.shape
    width = max((len(row) for row in problem.block_tables), default=0) * problem.block_size
    bias = rng.standard_normal((num_tokens, num_heads, max(1, width))).astype(np.float32)
    bias[rng.random(bias.shape) < 1 / 3] = -np.inf
    bias[rng.random(bias.shape[:2]) < 1 / 10] = -np.inf
    return bias


_MAKERS = {"sinks": random_sinks, "bias": random_bias}


def random_tables(
    rng: np.random.Generator, blocks: Sequence[int], num_blocks: int
) -> list[list[int]]:
    """Rows of distinct block ids, `blocks[s]` of them in row s."""
    ids = rng.permutation(num_blocks).tolist()
    stops = np.cumsum(blocks).tolist()
    return [ids[stop - n : stop] for stop, n in zip(stops, blocks, strict=True)]

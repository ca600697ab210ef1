"""Problems of given lengths, with random values and tables."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._arrays.namespace import cdiv
from . import features
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
    **kinds: Any,
) -> Problem:
    """A problem with unit normal values and shuffled blocks, poisoned wherever no query looks.

    `num_blocks` defaults to three more than are needed; `pad_tokens` is the length of the token
    axis, by default without padding; `block_tables=None` draws tables without sharing; `arrays` are
    the options of `features.ARRAYS` that it has; `cache_dtype` quantises the caches, with a scale
    for each KV head of the keys, and one of the values; `value_dim` are the columns of the values,
    by default those of the keys, which hold them if it is a latent cache; `kinds` are others of
    `features.KINDS`.

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
    pool = num_blocks, block_size, num_kv_heads, head_dim
    shapes = (num_tokens, num_heads, head_dim), pool, pool
    query, key, value = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    lens = list(query_lens), list(seq_lens)
    problem = Problem(query, key, value, block_tables, *lens, spec, max_query_len)
    problem = problem.replace(**{name: random_array(rng, problem, name) for name in arrays})
    kinds |= {"value_dim": value_dim, "latent": latent, "cache_dtype": cache_dtype}
    problem = features.with_kinds(problem, kinds)
    return problem if poison is None else problem.poisoned(poison)


def random_array(rng: np.random.Generator, problem: Problem, name: str) -> np.ndarray:
    """An option of `features.ARRAYS` for a problem."""
    num_tokens, num_heads, _ = problem.query.shape
    width = max((len(row) for row in problem.block_tables), default=0)
    of_cache = len(problem.seq_lens), problem.key_cache.shape[2], width
    option = features.ARRAYS[name]
    shape = option.shape(
        features.Sizes(num_tokens, num_heads, width * problem.block_size, *of_cache)
    )
    array = rng.standard_normal(shape).astype(option.dtype)
    option.fill(rng, array)
    return array


def random_tables(
    rng: np.random.Generator, blocks: Sequence[int], num_blocks: int
) -> list[list[int]]:
    """Rows of distinct block ids, `blocks[s]` of them in row s."""
    ids = rng.permutation(num_blocks).tolist()
    stops = np.cumsum(blocks).tolist()
    return [ids[stop - n : stop] for stop, n in zip(stops, blocks, strict=True)]

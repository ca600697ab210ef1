"""A problem as the library runs it: its batch, its cache, and attention on JAX arrays."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from .. import Backend, BatchMetadata, KVCache, UnsupportedError, make_batch, paged_attention
from .problem import Problem


def batch_of(problem: Problem) -> BatchMetadata:
    """The batch of a problem, by `make_batch`; its shapes are those of the problem.

    Example:
        >>> from pagedattn import AttentionSpec
        >>> from pagedattn.testing import random_problem
        >>> problem = random_problem([1, 3], [9, 3], AttentionSpec())
        >>> batch_of(problem).seq_lens.tolist()
        [9, 3]
    """
    cross = min(problem.context_lens, default=0) < 0
    return make_batch(
        list(problem.query_lens),
        None if cross else problem.context_lens,
        problem.block_tables,
        key_lens=list(problem.seq_lens) if cross else None,
        block_size=problem.block_size,
        parents=None if problem.parents is None else problem.parents[: sum(problem.query_lens)],
        pad_tokens=len(problem.query),
        max_query_len=problem.max_query_len,
    )


def cache_of(problem: Problem) -> KVCache:
    """The cache of a problem as JAX arrays.

    Example:
        >>> from pagedattn import AttentionSpec
        >>> from pagedattn.testing import random_problem
        >>> problem = random_problem([1, 3], [9, 3], AttentionSpec())
        >>> cache_of(problem).block_size
        4
    """
    return jax.tree.map(jnp.asarray, numpy_cache(problem))


# The names of a cache's arrays in a problem, where they differ.
PLANES = {"key": "key_cache", "value": "value_cache"}


def numpy_cache(problem: Problem) -> KVCache:
    """The cache of a problem, whose arrays it keeps."""
    fields = [field.name for field in dataclasses.fields(KVCache)]
    return KVCache(*(getattr(problem, PLANES.get(name, name)) for name in fields))


@functools.partial(jax.jit, static_argnames=("spec", "backend", "return_lse", "batch_invariant"))
def attend_in_jit(query, cache, batch, spec, **options):
    return paged_attention(query, cache, batch, spec, **options)


def attend(
    problem: Problem,
    *,
    backend: str | Backend | None,
    jit: bool = False,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> Any:
    """`paged_attention` on a problem: `(out, lse)`, or out alone without `return_lse`.

    Raises:
        UnsupportedError, BackendUnavailableError: as `paged_attention`.

    Example:
        >>> from pagedattn import AttentionSpec
        >>> from pagedattn.testing import random_problem
        >>> problem = random_problem([1, 3], [9, 3], AttentionSpec())
        >>> out, lse = attend(problem, backend="xla")
        >>> out.shape, lse.shape
        ((4, 4, 16), (4, 4))
    """
    call = attend_in_jit if jit else paged_attention
    rows = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    arrays = jax.tree.map(jnp.asarray, problem.arrays)
    options = {"return_lse": return_lse, "batch_invariant": batch_invariant}
    return call(*rows, problem.spec, backend=backend, **options, **arrays)


def attend_with_lse(
    problem: Problem, backend: str | Backend | None, jit: bool, **options: bool
) -> tuple[Any, Any]:
    """out and lse; lse is None if the backend refuses to give it."""
    try:
        return attend(problem, backend=backend, jit=jit, **options)
    except UnsupportedError as error:
        if "lse" not in str(error):
            raise
        return attend(problem, backend=backend, jit=jit, return_lse=False, **options), None

"""Decodes over random caches, as a model's layers compute them: in one program of many calls."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from benchmarks.drawn import drawn
from pagedattn import BatchMetadata, KVCache, make_batch
from pagedattn.extend import cdiv

BLOCK_SIZE = 16
LAYERS = 8  # calls of attention in one program


def random_cache(
    shape: tuple[int, ...], dtype=jnp.bfloat16, sharding: Sharding | None = None, seed: int = 0
) -> KVCache:
    """A cache whose planes have this shape."""
    keys = jax.random.split(jax.random.key(seed))
    return KVCache(*(drawn(key, shape, dtype, sharding) for key in keys))


def shuffled(num_seqs: int, length: int) -> BatchMetadata:
    """Decodes of sequences whose blocks lie anywhere in the cache."""
    blocks = np.random.default_rng(0).permutation(num_seqs * cdiv(length, BLOCK_SIZE))
    tables, ones = blocks.reshape(num_seqs, -1).tolist(), [1] * num_seqs
    return make_batch(ones, [length - 1] * num_seqs, tables, block_size=BLOCK_SIZE)


def layers_of(call: Callable) -> Callable:
    """Calls of which each waits for the one before, as the layers of a model do."""

    @jax.jit
    def program(query, cache, batch):
        for _ in range(LAYERS):
            query, cache = after(query, cache)
            query = call(query, cache, batch)
        return query

    return program


def after(query: jax.Array, operands):
    """The same arrays, where XLA cannot compute anything of keys and values before the query.

    Else it would drop calls, or gather pages once for two of them, while every layer of a model has
    a cache of its own. Its layers share the tables and lengths, and what follows from these alone
    is computed once, as what peers plan for a step is.
    """
    leaves, tree = jax.tree.flatten(operands)
    planes = [leaf for leaf in leaves if leaf.ndim > 2]
    query, planes = jax.lax.optimization_barrier((query, planes))
    behind = iter(planes)
    return query, tree.unflatten([next(behind) if leaf.ndim > 2 else leaf for leaf in leaves])

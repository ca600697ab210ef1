"""Decodes over random caches, as a model's layers compute them: in one program of many calls."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from benchmarks.drawn import drawn
from pagedattn import BatchMetadata, KVCache, make_batch
from pagedattn.ragged import cdiv

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
            query, cache, batch = jax.lax.optimization_barrier((query, cache, batch))
            query = call(query, cache, batch)
        return query

    return program

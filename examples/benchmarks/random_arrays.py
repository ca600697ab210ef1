"""Random arrays, caches and block tables, made where they lie: one program for all of a shape."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, PRNGKeyArray

from pagedattn import BatchMetadata, KVCache, make_batch
from pagedattn.extend import cdiv

BLOCK_SIZE = 16


@partial(jax.jit, static_argnames=("shape", "dtype", "sharding"))
def random_array(
    key: PRNGKeyArray,
    shape: tuple[int, ...],
    dtype=jnp.bfloat16,
    sharding: Sharding | None = None,
    scale: float = 1.0,
) -> Array:
    """Normal numbers with this standard deviation."""
    numbers = (scale * jax.random.normal(key, shape, jnp.bfloat16)).astype(dtype)
    return numbers if sharding is None else jax.lax.with_sharding_constraint(numbers, sharding)


def random_cache(
    shape: tuple[int, ...], dtype=jnp.bfloat16, sharding: Sharding | None = None, seed: int = 0
) -> KVCache:
    """A cache whose planes have this shape."""
    keys = jax.random.split(jax.random.key(seed))
    return KVCache(*(random_array(key, shape, dtype, sharding) for key in keys))


def random_decodes(num_seqs: int, length: int) -> BatchMetadata:
    """Decodes of sequences whose blocks lie anywhere in the cache."""
    blocks = np.random.default_rng(0).permutation(num_seqs * cdiv(length, BLOCK_SIZE))
    tables, ones = blocks.reshape(num_seqs, -1).tolist(), [1] * num_seqs
    return make_batch(ones, [length - 1] * num_seqs, tables, block_size=BLOCK_SIZE)

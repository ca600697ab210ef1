"""Random arrays, made where they lie: one compiled program for all of a shape."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jaxtyping import Array, PRNGKeyArray


@partial(jax.jit, static_argnames=("shape", "dtype", "sharding"))
def drawn(
    key: PRNGKeyArray,
    shape: tuple[int, ...],
    dtype=jnp.bfloat16,
    sharding: Sharding | None = None,
    scale: float = 1.0,
) -> Array:
    """Normal numbers with this standard deviation."""
    numbers = (scale * jax.random.normal(key, shape, jnp.bfloat16)).astype(dtype)
    return numbers if sharding is None else jax.lax.with_sharding_constraint(numbers, sharding)

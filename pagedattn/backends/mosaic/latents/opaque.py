"""Addresses that are computed where they are used."""

import jax.numpy as jnp
from jax import lax


def opaque(value: int):
    """A number that the compiler does not know, anew at each step.

    It would compute the addresses of all operands before the loop, and keep them where there is
    room: in local memory.
    """
    return lax.optimization_barrier(jnp.int32(value))

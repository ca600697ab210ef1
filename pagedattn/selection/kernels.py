"""Kernels for scores and choice, of the backends that have them on a kind of device."""

from importlib import import_module
from types import ModuleType

import jax
import jax.numpy as jnp

from .._arrays.devices import device_of
from .._dispatch.registry import can_load

BACKENDS = {"cpu": "numba", "cuda": "triton"}


def kernels_for(array) -> ModuleType | None:
    """The module with `scores` and `best` for the device of an array; None where XLA computes."""
    name = BACKENDS.get(device_of(array))
    if name is None or not can_load(name):
        return None
    return import_module(f"pagedattn.backends.{name}.scores")


def constant(array) -> jax.Array:
    """As a JAX array, for kernels that have no gradients."""
    return jax.lax.stop_gradient(jnp.asarray(array))

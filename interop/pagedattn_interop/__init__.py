"""JAX and torch together: arrays crossing by DLPack, and torch functions inside jax.jit."""

import pagedattn_torch as _pagedattn_torch  # noqa: F401  (says how to install torch)

from .arrays import to_jax, to_torch
from .call import torch_call

__all__ = [
    "to_jax",
    "to_torch",
    "torch_call",
]

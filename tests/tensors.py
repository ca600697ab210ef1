"""Arrays of the tests as torch tensors."""

from typing import Any

import jax
import numpy as np
import torch
from pagedattn_interop import to_torch
from pagedattn_interop.backends import takes


def tensors(tree: Any) -> Any:
    """Copies of the arrays of a tree, also of dtypes that this torch does not take by DLPack."""
    return jax.tree.map(_tensor, tree)


def _tensor(array):
    dtype = str(array.dtype)
    if takes(dtype):
        return to_torch(array, copy=True)
    return torch.from_numpy(np.asarray(array).view(np.uint8).copy()).view(getattr(torch, dtype))

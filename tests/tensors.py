"""Arrays of the tests as torch tensors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from pagedattn_interop import to_torch
from pagedattn_interop.backends import takes

import pagedattn_torch
from pagedattn import KVCache
from pagedattn.testing import batch_of, cache_of


def tensors(tree: Any) -> Any:
    """Copies of the arrays of a tree, also of dtypes that this torch does not take by DLPack."""
    return jax.tree.map(_tensor, tree)


def _tensor(array):
    dtype = str(array.dtype)
    if takes(dtype):
        return to_torch(array, copy=True)
    return torch.from_numpy(np.asarray(array).view(np.uint8).copy()).view(getattr(torch, dtype))


def by_torch(problem, backend, **options):
    """out and lse of a problem by a backend on tensors; options are those of `paged_attention`."""
    tree = (jnp.asarray(problem.query), cache_of(problem), problem.arrays)
    query, cache, arrays = tensors(jax.tree.map(jnp.asarray, tree))
    arrays |= {"backend": backend, "return_lse": True, **options}
    results = pagedattn_torch.paged_attention(
        query, cache, batch_of(problem), problem.spec, **arrays
    )
    return [x.float().cpu().numpy() for x in results]


def interleaved(cache: KVCache) -> KVCache:
    """The same values in one tensor `[num_blocks, 2, block_size, ...]`: planes with gaps."""
    pool = torch.stack([cache.key, cache.value], dim=1)
    return KVCache(pool[:, 0], pool[:, 1])

"""The torch backends as backends for JAX arrays."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pagedattn import AttentionSpec
from pagedattn.backend import Backend
from pagedattn.backends.gradient import with_xla_gradient
from pagedattn.checks import is_traced
from pagedattn.registry import platform_of
from pagedattn_torch import sdpa
from pagedattn_torch.cache import set_rows_

from .arrays import to_jax, to_torch
from .call import torch_call


def bridged(backend: Backend) -> Backend:
    """A torch backend on JAX arrays: by DLPack for concrete ones on the CPU, else by torch_call.

    On a GPU neither framework would know when the other's kernels are done with memory that is
    freed meanwhile; XLA knows of what it calls itself. The backend's `unsupported` takes arrays of
    either framework; its `run` never waits for a GPU, nor depends on values there, so that XLA may
    capture it.
    """

    def run(query, cache, batch, spec, return_lse):
        arrays = (query, cache, batch)
        traced = any(is_traced(leaf) for leaf in jax.tree.leaves(arrays))
        if traced or platform_of(query) != "cpu":
            return _by_xla(backend, arrays, spec, return_lse)
        out, lse = backend.run(*to_torch(arrays), spec, return_lse)
        return to_jax(out), to_jax(lse) if return_lse else None

    return Backend(backend.name, backend.unsupported, with_xla_gradient(run), set_rows)


def _by_xla(backend, arrays, spec, return_lse):
    query = arrays[0]
    leaves, treedef = jax.tree.flatten(arrays)
    outs = [jax.ShapeDtypeStruct(query.shape, query.dtype)]
    if return_lse:
        outs.append(jax.ShapeDtypeStruct(query.shape[:2], jnp.float32))
    fn = _Attend(backend, treedef, spec, return_lse)
    out, *lse = torch_call(fn, outs, capturable=True)(*leaves)
    return out, lse[0] if lse else None


@dataclasses.dataclass(frozen=True)
class _Attend:
    """The torch function of one static setting; equal ones are one to XLA, too."""

    backend: Backend
    treedef: Any
    spec: AttentionSpec
    return_lse: bool

    def __call__(self, *leaves):
        arrays = jax.tree.unflatten(self.treedef, leaves)
        out, lse = self.backend.run(*arrays, self.spec, self.return_lse)
        return (out, lse) if self.return_lse else out


def set_rows(array, indices, rows):
    """Rows of a JAX array set in place by torch, inside jit."""
    out = jax.ShapeDtypeStruct(array.shape, array.dtype)
    return torch_call(set_rows_, out, aliases={0: 0}, capturable=True)(array, indices, rows)


def too_little_work(query, cache, batch, spec, return_lse) -> list[str]:
    """Under some ten million products XLA's own loop beats calling out to torch, on a CPU."""
    work = query.size * batch.max_blocks * batch.block_size
    if platform_of(query) == "cpu" and work < LEAST_WORK:
        return [f"{work} products at most: xla is faster under {LEAST_WORK}"]
    return []


LEAST_WORK = 1 << 24  # products of a query's element with a key's: the two are even there
SDPA = dataclasses.replace(bridged(sdpa.BACKEND), unfit=too_little_work)

"""Makes backends for torch tensors into backends for JAX arrays."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.core import Tracer
from jaxtyping import Array, Int, Shaped

from pagedattn import UnsupportedError
from pagedattn._dispatch.backend import Backend
from pagedattn._dispatch.call import Call, layer_of
from pagedattn.backends.gradient import with_xla_gradient
from pagedattn.cache.packing import held_dtype
from pagedattn_torch.arrays import without_autocast
from pagedattn_torch.cache import set_rows_
from pagedattn_torch.step import as_loaded

from .arrays import to_jax, to_torch
from .call import torch_call
from .functions import text_of

SHARED_DEVICES = ("cpu", "cuda")  # JAX and torch share memory on these


def bridged(backend: Backend) -> Backend:
    """A torch backend for JAX arrays: by DLPack for concrete arrays on one CPU, else by torch_call.

    On a GPU kernels run in the background, and neither framework knows when the other's are done
    with memory that it frees. With torch_call XLA itself orders them. XLA may then capture the
    call in a CUDA graph, since torch backends never wait for a GPU nor depend on values there.
    """

    def run(call, query, cache, batch, **options):
        arrays = (query, cache, batch, options)
        if not _one_cpu(call) or any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arrays)):
            return _by_xla(backend, call, arrays)
        query, cache, batch, options = to_torch(arrays)
        query = as_loaded(query, cache)
        # The axes of JAX's arrays may lie in any order, of which the call knows nothing.
        lying = replace(call, strides=layer_of(query, cache).strides)
        plan = backend.plan(lying, batch)
        with without_autocast(query.device):
            out, lse = backend.run(lying, query, cache, plan, **options)
        return to_jax(out), to_jax(lse) if call.return_lse else None

    return replace(
        backend,
        run=with_xla_gradient(run),
        refusals=lambda call: _not_shared(call) or backend.refusals(call),
        slower_because=lambda call: [*backend.slower_because(call), *_too_little_work(call)],
        plan=lambda call, batch: batch,
    )


def _one_cpu(call: Call) -> bool:
    """Whether JAX has one CPU device, on which it lies: DLPack gives all memory to the first."""
    return call.device == "cpu" and len(jax.devices("cpu")) == 1


def _not_shared(call: Call) -> list[str]:
    reasons = []
    if call.device not in SHARED_DEVICES:
        devices = " and ".join(SHARED_DEVICES)
        reasons.append(f"torch shares JAX's memory on {devices}, not on {call.device}")
    held = held_dtype(call.cache_dtype)
    if held and not takes(held):
        reasons.append(f"cache_dtype: {_not_taken(held)}")
    return reasons


def _not_taken(dtype) -> str:
    return f"torch {torch.__version__} takes no {dtype} arrays from JAX; a newer one does"


@functools.cache
def takes(dtype: str) -> bool:
    """Whether torch takes arrays of this dtype by DLPack: float8 came after torch 2.8."""
    if not hasattr(torch, dtype):
        return False
    try:
        torch.from_dlpack(torch.zeros(1, dtype=getattr(torch, dtype), device="cpu"))
    except (BufferError, RuntimeError):
        return False
    return True


def _too_little_work(call: Call) -> list[str]:
    """On a CPU, with few products, the xla backend is faster than a call of torch."""
    work = call.num_tokens * call.num_heads * call.head_dim * call.capacity
    if call.device == "cpu" and work < (least := call.crossings.sdpa_work):
        return [f"{work} products at most: xla is faster under {least}"]
    return []


def _by_xla(backend, call: Call, arrays):
    query, cache, batch, options = arrays
    plan = backend.plan(call, batch) if backend.plans_any else batch
    leaves, treedef = jax.tree.flatten((query, cache, plan, options))
    outs = [jax.ShapeDtypeStruct(call.out_shape, query.dtype)]
    if call.return_lse:
        outs.append(jax.ShapeDtypeStruct(call.lse_shape, jnp.float32))
    attend, takes_out = _Attend(backend, treedef, call), backend.takes_out
    out, *lse = torch_call(attend, outs, capturable=True, takes_out=takes_out)(*leaves)
    return out, lse[0] if lse else None


@dataclass(frozen=True)
class _Attend:
    """The torch function for one call's static facts; XLA takes equal ones for one function."""

    backend: Backend
    treedef: Any
    call: Call

    def text(self) -> str | None:
        """What it is called in every process: see `functions`."""
        parts = text_of(self.backend.plan), text_of(self.backend.run)
        return (
            None
            if None in parts
            else f"{parts} {self.backend.plans_any} {self.treedef} {self.call}"
        )

    def __call__(self, *leaves, out=None):
        query, cache, plan, options = jax.tree.unflatten(self.treedef, leaves)
        if not self.backend.plans_any:
            plan = self.backend.plan(self.call, plan)
        if out is not None:
            options["out"] = (*out, None)[:2]
        out, lse = self.backend.run(self.call, query, cache, plan, **options)
        return (out, lse) if self.call.return_lse else out


def set_rows(
    array: Shaped[Array, "*shape"], indices: Int[Array, "n"], rows: Shaped[Array, "n *row"]
) -> Shaped[Array, "*shape"]:
    """Sets rows of a JAX array in place, inside jit.

    Raises:
      UnsupportedError: torch takes no arrays of this dtype.
    """
    if not takes(array.dtype.name):
        raise UnsupportedError(_not_taken(array.dtype))
    out = jax.ShapeDtypeStruct(array.shape, array.dtype)
    return torch_call(set_rows_, out, aliases={0: 0}, capturable=True)(array, indices, rows)

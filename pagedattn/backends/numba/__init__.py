"""Paged attention on a CPU by the library's own compiled kernel, called by XLA itself.

Decode and short queries read the pages in place; prompts and chunks pack them, a tile at a time,
for matrix products. XLA calls the machine code on one of its threads, and its others help: no
Python runs, and nothing waits for the GIL.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

from ..._arrays.shard_map import axes_of, varying
from ..._dispatch.backend import Backend
from ..._dispatch.call import Call
from ..._kernels.cpu.compiled import prefill
from ...batch.metadata import Sequences
from ...cache.quantise import scale_of_values
from ..gradient import with_xla_gradient
from .support import (
    SUPPORTS,
    dtype_of,
    dtypes_of,
    longest,
    num_threads,
    numbers,
    options,
    refusals,
)
from .targets import register_attention


def plan(call: Call, batch: Sequences) -> Sequences:
    """The kernel itself takes starts that fall for those before them."""
    return batch


def run(
    call: Call,
    query,
    cache,
    batch: Sequences,
    *,
    bias=None,
    selection=None,
    threads: int | None = None,
):
    threads = num_threads() if threads is None else threads
    return _run(call, query, cache, batch, bias, selection, threads)


@functools.partial(jax.jit, static_argnames=("call", "threads"))
def _run(call: Call, query, cache, batch, bias, selection, threads):
    """out and lse of a call; every element of both is written by the kernel."""
    if call.longest_query > longest(call):
        prefill(*dtypes_of(call))
    value = cache.key if cache.value is None else cache.value
    arrays = query.astype(dtype_of(call)), cache.key, value, batch.block_tables, batch.seq_lens
    beside = bias, cache.key_scale, scale_of_values(cache)
    added = (
        array if array.ndim == 4 else jnp.asarray(array, jnp.float32)
        for array in beside
        if array is not None
    )
    tree = () if batch.tree is None else (batch.tree.depths, batch.tree.ancestors)
    arrays = *arrays, batch.query_start_loc, *added, *_given(selection), *tree
    outs = [jax.ShapeDtypeStruct(call.out_shape, dtype_of(call))]
    if call.return_lse:
        outs.append(jax.ShapeDtypeStruct(call.lse_shape, jnp.float32))
    target = register_attention(*dtypes_of(call))
    kernel = jax.ffi.ffi_call(target, outs, vmap_method="sequential")
    brings = (array is not None for array in (*beside, selection, batch.tree))
    integers = options(call, threads, brings)
    results = kernel(*arrays, floats=numbers(call), integers=integers)
    out, *lse = varying(tuple(results), axes_of(arrays))
    return out.astype(query.dtype), lse[0] if lse else None


def _given(array) -> tuple:
    return () if array is None else (array,)


BACKEND = Backend(
    "numba",
    SUPPORTS,
    with_xla_gradient(run),
    refusals,
    plan=plan,
)


def with_threads(threads: int) -> Backend:
    """The backend with a number of threads of its own, to be given as `backend=`.

    >>> with_threads(1).name
    'numba'
    """
    return replace(BACKEND, run=with_xla_gradient(functools.partial(run, threads=threads)))

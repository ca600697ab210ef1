"""Paged attention by the library's own Triton kernels, launched by XLA itself.

The kernels are compiled while a call is traced, and become part of its program. When it runs, no
Python does, so several GPUs of one process do not wait for each other.
"""

import functools

import jax
import jax.numpy as jnp

from ..._dispatch.backend import Backend
from ..._dispatch.call import Call
from ..._dispatch.dequantise import XLA
from ..._kernels.triton.arguments import Arrays, Parts, Results
from ..._kernels.triton.attention import attention_kernel
from ..._kernels.triton.device import device_of
from ..._kernels.triton.launch import (
    SUPPORTS,
    Launch,
    attention_launch,
    is_dequantised,
    merge_launch,
    parts_of,
    refusals,
    starts_in_order,
    with_strides,
)
from ..._kernels.triton.lists import listed_blocks
from ..._kernels.triton.merge import join_kernel, merge_kernel
from ..._kernels.triton.tiling import tiling
from ...cache.quantise import as_read, scale_of_values
from ..dequantised import dequantised_first
from ..gradient import with_xla_gradient
from .program import missing, start


@functools.partial(jax.jit, static_argnames="call")
def run(call: Call, query, cache, batch, *, sinks=None, selection=None):
    """out and lse of a call; every element of both is written by the kernels."""
    if is_dequantised(call, XLA):
        call, cache, batch = dequantised_first(call, cache, batch)
    tiles = tiling(call, _device())
    slopes = jnp.asarray(call.spec.alibi_slopes or (0.0,), jnp.float32)
    tables = batch.block_tables
    if selection is not None:
        tables = listed_blocks(tables, selection)
    lens = batch.seq_lens, batch.query_start_loc
    sinks = slopes if sinks is None else sinks.astype(jnp.float32)
    value = cache.key if cache.value is None else cache.value
    held = {"key_scale": cache.key_scale, "value_scale": scale_of_values(cache)}
    scales = [slopes if scale is None else as_read(scale) for scale in held.values()]
    lines = (slopes, slopes) if batch.tree is None else (batch.tree.depths, batch.tree.ancestors)
    chosen = tables if selection is None else selection
    beside = slopes, *lines, sinks, *scales, chosen
    arrays = Arrays(query, cache.key, value, tables, *lens, *beside)
    outs = Results(
        jax.ShapeDtypeStruct(call.out_shape, query.dtype),
        jax.ShapeDtypeStruct(call.lse_shape, jnp.float32),
    )
    launch = attention_launch(call, tiles, table_stride=call.max_blocks)
    launch = with_strides(launch, call, **held)
    if tiles.splits == 1:
        return _start(attention_kernel, arrays, launch, outs)
    parts = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in parts_of(call, tiles))
    parts = _start(attention_kernel, arrays, launch, Results(*parts))
    merge = merge_launch(call, tiles)
    if not call.batch_invariant:
        return _start(merge_kernel, parts, merge, outs)
    merge = with_strides(merge, call, value_scale=held["value_scale"])
    return _start(join_kernel, Parts(*parts, scales[1]), merge, outs)


BACKEND = Backend(
    "triton",
    SUPPORTS,
    with_xla_gradient(run),
    lambda call: refusals(call, capability()),
    plan=starts_in_order,
    missing=missing,
)


@functools.cache
def _device():
    return device_of(jax.devices("gpu")[0].core_count, capability())


@functools.cache
def capability() -> tuple[int, int]:
    """That of the first GPU."""
    major, minor = jax.devices("gpu")[0].compute_capability.split(".")
    return int(major), int(minor)


def _start(kernel, arrays, launch: Launch, outs: Results) -> Results:
    return Results(*start(kernel, (arrays,), launch, (outs,)))

"""Paged attention by the library's own Triton kernels, launched by XLA itself.

The kernels are compiled when a call is traced and become part of its program: no Python runs then,
and several GPUs of one process do not wait for each other.
"""

import functools

import jax
import jax.numpy as jnp

from ..backend import Backend
from ..kernels.launch import Launch, attention_launch, device_of, merge_launch, shape_of, tiling
from ..kernels.launch import refusals as launch_refusals
from ..manual_axes import axes_of, varying
from ..registry import platform_of
from .gradient import with_xla_gradient


def _import_kernels():
    """The kernels and their launcher; ImportError says how to install what they need."""
    try:
        from ..kernels.attention import attention_kernel
        from ..kernels.merge import merge_kernel
        from .triton_program import missing, program
    except ImportError as error:
        cure = "pip install 'pagedattn[triton]'"
        raise ImportError(f"it needs triton ({error}): {cure}") from error
    if reasons := missing():
        raise ImportError(f"it needs JAX for CUDA ({reasons[0]}): pip install 'jax[cuda13]'")
    return program, attention_kernel, merge_kernel


program, attention_kernel, merge_kernel = _import_kernels()


def unsupported(query, cache, batch, spec, return_lse) -> list[str]:
    reasons = launch_refusals(query, cache)
    if (platform := platform_of(query)) != "gpu":
        reasons.append(f"it needs arrays on a CUDA device, got them on {platform}")
    return reasons


def run(query, cache, batch, spec, return_lse):
    """out and lse of a call; every element of both is written by the kernels."""
    if not query.size:
        return query, jnp.full(query.shape[:2], -jnp.inf, jnp.float32)
    return _attend(query, cache, batch, spec)


TRITON = Backend("triton", unsupported, with_xla_gradient(run))


@functools.partial(jax.jit, static_argnames="spec")
def _attend(query, cache, batch, spec):
    shape = shape_of(query, cache, batch, spec)
    tiles = tiling(shape, _device())
    indices = (
        array.astype(jnp.int32)
        for array in (batch.block_tables, batch.seq_lens, batch.query_start_loc)
    )
    slopes = jnp.asarray(spec.alibi_slopes or (0.0,), jnp.float32)
    arrays = query, cache.key, cache.value, *indices, slopes
    outs = (
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct(query.shape[:2], jnp.float32),
    )
    launch = attention_launch(shape, tiles, spec, cache.num_blocks, _strides(shape))
    if tiles.splits == 1:
        return _start(attention_kernel, arrays, launch, outs)
    parts = [jax.ShapeDtypeStruct((tiles.splits, *out.shape), jnp.float32) for out in outs]
    parts = _start(attention_kernel, arrays, launch, parts)
    return _start(merge_kernel, parts, merge_launch(shape, tiles), outs)


def _strides(shape):
    """Those of XLA's arrays, which are dense: see `attention_launch`."""
    slot = shape.num_kv_heads * shape.head_dim
    token = shape.num_heads * shape.head_dim
    return shape.max_blocks, token, shape.head_dim, shape.block_size * slot, slot, shape.head_dim


@functools.cache
def _device():
    device = jax.devices("gpu")[0]
    major, minor = device.compute_capability.split(".")
    return device_of(device.core_count, (int(major), int(minor)))


def _start(kernel, arrays, launch: Launch, outs):
    outs = tuple(outs)
    opaque = program(kernel, arrays, launch, outs)
    call = jax.ffi.ffi_call("triton_kernel_call_ffi", outs, vmap_method="sequential")
    results = call(*arrays, name=kernel.__name__, opaque=opaque)
    return varying(tuple(results), axes_of(arrays))

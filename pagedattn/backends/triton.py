"""Paged attention by the library's own Triton kernels, launched by XLA itself.

The kernels are compiled when a call is traced and become part of its program: no Python runs then,
and several GPUs of one process do not wait for each other.
"""

import functools
import os
import zlib
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np

from ..backend import Backend, with_xla_gradient
from ..kernels.launch import Launch, attention_launch, device_of, merge_launch, shape_of, tiling
from ..kernels.launch import refusals as launch_refusals
from ..registry import platform_of


def _import_kernels():
    """jax-triton and the kernels; ImportError says how to install them."""
    # Importing jax-triton empties this variable, which breaks Triton's own launcher.
    kept = os.environ.get("TRITON_CACHE_DIR")
    try:
        from jax_triton import triton_lib  # pyright: ignore[reportMissingImports]

        from ..kernels.attention import attention_kernel
        from ..kernels.merge import merge_kernel
    except ImportError as error:
        raise ImportError(
            f"it needs jax-triton and triton ({error}): pip install 'pagedattn[triton]'"
        ) from error
    finally:
        os.environ.pop("TRITON_CACHE_DIR", None)
        if kept is not None:
            os.environ["TRITON_CACHE_DIR"] = kept
    return triton_lib, attention_kernel, merge_kernel


triton_lib, attention_kernel, merge_kernel = _import_kernels()

# These versions' triton_call is a custom call that XLA keeps out of command buffers and that hashes
# the whole program at each launch (7 us). jaxlib has a better launcher, Pallas's: use that one.
LEGACY = version("jax-triton") in ("0.3.0", "0.3.1")
TYPES = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32"}


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
    if LEGACY:
        opaque = _program(kernel, arrays, launch, outs)
        call = jax.ffi.ffi_call("triton_kernel_call_ffi", outs, vmap_method="sequential")
        return tuple(call(*arrays, name=kernel.__name__, opaque=opaque))
    # A Python float would become a float64 argument.
    scalars = [np.float32(s) if isinstance(s, float) else s for s in launch.scalars]
    return triton_lib.triton_call(
        *arrays,
        *scalars,
        kernel=kernel,
        out_shape=outs,
        grid=launch.grid,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **launch.constants,
    )


def _program(kernel, arrays, launch: Launch, outs) -> bytes:
    """The compiled kernel and its arguments, as jaxlib's launcher reads them."""
    library = triton_lib.triton_kernel_call_lib
    numbered = [
        (i, "fp32" if isinstance(scalar, float) else "i32", scalar)
        for i, scalar in enumerate(launch.scalars, len(arrays))
    ]
    types = [TYPES[array.dtype.name] for array in arrays]
    types += [kind for _, kind, _ in numbered]
    types += [TYPES[out.dtype.name] for out in outs]
    compiled, _ = triton_lib.get_or_create_triton_kernel(
        triton_lib.get_cuda_backend,
        "cuda",
        kernel,
        types,
        numbered,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        num_ctas=1,
        compute_capability=None,
        enable_fp_fusion=True,
        metaparams=launch.constants,
        dump=False,
    )
    array = library.create_array_parameter(0, 16)
    # Scalars of 1 have become constants of the program.
    passed = [library.create_scalar_parameter(v, kind) for _, kind, v in numbered if v != 1]
    parameters = [array] * len(arrays) + passed + [array] * len(outs)
    call = library.TritonKernelCall(compiled, *launch.grid, parameters)
    return zlib.compress(call.to_proto(kernel.__name__, b""))

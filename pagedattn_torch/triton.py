"""Paged attention by the library's own Triton kernels, launched by Triton from torch.

Nothing here waits for the device or depends on its values, so calls can be captured in a CUDA
graph. Under `TRITON_INTERPRET=1` the kernels run on CPU tensors.
"""

import functools

import torch
from torch import Tensor
from triton import knobs

from pagedattn.backend import Backend
from pagedattn.kernels.attention import attention_kernel
from pagedattn.kernels.launch import (
    Device,
    attention_launch,
    device_of,
    merge_launch,
    shape_of,
    tiling,
)
from pagedattn.kernels.launch import refusals as launch_refusals
from pagedattn.kernels.merge import merge_kernel

from .device_bias import slopes_on


def unsupported(query, cache, batch, spec, return_lse) -> list[str]:
    reasons = launch_refusals(query, cache)
    if query.device.type != "cuda" and not knobs.runtime.interpret:
        reasons.append(f"it needs tensors on a CUDA device, got them on {query.device}")
    if cache.key.stride() != cache.value.stride() or cache.key.stride(3) != 1:
        reasons.append(
            "key and value of the cache must have the same strides, that of head_dim 1, got "
            f"{cache.key.stride()} and {cache.value.stride()}"
        )
    return reasons


def run(query: Tensor, cache, batch, spec, return_lse: bool):
    """out and lse of a call; every element of both is written by the kernels."""
    query = query if query.stride(2) == 1 else query.contiguous()
    tables, seq_lens, starts = (
        array.to(torch.int32)
        for array in (batch.block_tables, batch.seq_lens, batch.query_start_loc)
    )
    tables = tables if tables.stride(1) == 1 else tables.contiguous()
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    if not len(query):
        return out, lse
    shape = shape_of(query, cache, batch, spec)
    tiles = tiling(shape, _device(query.device))
    strides = tables.stride(0), *query.stride()[:2], *cache.key.stride()[:3]
    slopes = seq_lens if spec.alibi_slopes is None else slopes_on(spec.alibi_slopes, query.device)
    arrays = query, cache.key, cache.value, tables, seq_lens.contiguous(), starts.contiguous()
    launch = attention_launch(shape, tiles, spec, cache.num_blocks, strides)
    if tiles.splits == 1:
        _start(attention_kernel, (*arrays, slopes), launch, (out, lse))
        return out, lse
    split_out, split_lse = (
        query.new_empty(tiles.splits, *plane.shape, dtype=torch.float32) for plane in (out, lse)
    )
    _start(attention_kernel, (*arrays, slopes), launch, (split_out, split_lse))
    _start(merge_kernel, (split_out, split_lse), merge_launch(shape, tiles), (out, lse))
    return out, lse


BACKEND = Backend("triton", unsupported, run)


def _start(kernel, arrays, launch, outs):
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(outs[0]):
        kernel[launch.grid](
            *arrays,
            *launch.scalars,
            *outs,
            **launch.constants,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )


@functools.cache
def _device(device) -> Device:
    if device.type != "cuda":
        return Device(num_sms=64, shared_bytes=1 << 20)  # for the interpreter
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return device_of(num_sms, torch.cuda.get_device_capability(device))

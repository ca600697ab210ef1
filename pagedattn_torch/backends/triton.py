"""Paged attention by the library's own Triton kernels, launched by Triton from torch.

Nothing here waits for the device or depends on its values, so calls can be captured in a CUDA
graph. Under `TRITON_INTERPRET=1` the kernels run on CPU tensors.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from pagedattn import UnsupportedError
from pagedattn._arrays.namespace import arange
from pagedattn._dispatch.backend import Backend
from pagedattn._dispatch.call import Call
from pagedattn._dispatch.dequantise import TRITON, dequantised_call
from pagedattn._kernels.triton import launch
from pagedattn._kernels.triton.arguments import Arrays, Parts, Results
from pagedattn._kernels.triton.attention import attention_kernel
from pagedattn._kernels.triton.dequantise import Held, dequantise_kernel, dequantise_launch
from pagedattn._kernels.triton.device import Device, device_of
from pagedattn._kernels.triton.launch import Launch
from pagedattn._kernels.triton.lists import listed_blocks
from pagedattn._kernels.triton.merge import join_kernel, merge_kernel
from pagedattn._kernels.triton.tiling import Tiling, tiling
from pagedattn.cache.kv_cache import KVCache
from pagedattn.cache.quantise import as_read, scale_of_values

from .bias import slopes_on


class Plan(NamedTuple):
    """What the layers of a step share: the kernels' launches, and the arrays of the batch."""

    tiles: Tiling
    attention: Launch
    merge: Launch
    # block_tables, seq_lens, query_start_loc, slopes, and the tree's depths and ancestors
    tables: tuple[Tensor, ...]
    dequantised: Tensor | None  # the block tables, if those above are of a dequantised cache


def refusals(call: Call) -> list[str]:
    capability = torch.cuda.get_device_capability() if call.device == "cuda" else None
    reasons = launch.refusals(call, capability)
    if any(strides[3:] not in ((), (1,)) for strides in (call.strides.key, call.strides.value)):
        reasons.append(
            "the last axis of the cache's key and value must have stride 1, got strides "
            f"{call.strides.key} and {call.strides.value}"
        )
    return reasons


def plan(call: Call, batch) -> Plan:
    batch, tables = launch.starts_in_order(call, batch), batch.block_tables
    tables = tables if tables.stride(1) == 1 else tables.contiguous()
    lens, starts = batch.seq_lens.contiguous(), batch.query_start_loc.contiguous()
    slopes = call.spec.alibi_slopes
    slopes = lens if slopes is None else slopes_on(slopes, lens.device)
    dequantised = None
    if launch.is_dequantised(call, TRITON):
        dequantised, call = tables, dequantised_call(call)
        tables = arange(call.num_blocks, tables).view(tables.shape)
    tiles = tiling(call, _device(lens.device))
    attention = launch.attention_launch(call, tiles, table_stride=tables.stride(0))
    merge = launch.merge_launch(call, tiles)
    lines = lens, lens
    if batch.tree is not None:
        lines = batch.tree.depths.contiguous(), batch.tree.ancestors.contiguous()
    return Plan(tiles, attention, merge, (tables, lens, starts, slopes, *lines), dequantised)


def run(
    call: Call,
    query: Tensor,
    cache,
    plan: Plan,
    *,
    sinks: Tensor | None = None,
    selection: Tensor | None = None,
):
    """out and lse of a call; every element of both is written by the kernels."""
    if plan.dequantised is not None:
        cache = dequantised(call, query, cache, plan.dequantised, plan.tables[1])
        call = dequantised_call(call)
    elif call.cache_dtype is not None:
        require_pairs(cache)
    sinks = plan.tables[-1] if sinks is None else sinks.float().contiguous()
    value = cache.key if cache.value is None else cache.value
    tables, *others = plan.tables
    chosen = tables if selection is None else selection.contiguous()
    if selection is not None:
        tables = listed_blocks(tables, chosen)
    held = {"key_scale": cache.key_scale, "value_scale": scale_of_values(cache)}
    scales = [sinks if scale is None else aligned(as_read(scale)) for scale in held.values()]
    given = {"sinks": sinks, "key_scale": scales[0], "value_scale": scales[1], "selection": chosen}
    arrays = Arrays(query, cache.key, value, tables, *others, **given)
    lse = query.new_empty(call.lse_shape, dtype=torch.float32)
    outs = Results(query.new_empty(call.out_shape), lse)
    attention = launch.with_strides(plan.attention, call, **held)
    if plan.tiles.splits == 1:
        _start(attention_kernel, arrays, attention, outs)
        return outs
    shapes = launch.parts_of(call, plan.tiles)
    parts = Results(*(query.new_empty(shape, dtype=torch.float32) for shape in shapes))
    _start(attention_kernel, arrays, attention, parts)
    if call.batch_invariant:
        joining = launch.with_strides(plan.merge, call, value_scale=held["value_scale"])
        _start(join_kernel, Parts(*parts, scales[1]), joining, outs)
    else:
        _start(merge_kernel, parts, plan.merge, outs)
    return outs


def require_pairs(cache) -> None:
    """Requires planes of fewer bits to begin where two bytes can be read at once."""
    for name, plane in zip(("key", "value"), cache.planes, strict=False):
        if plane.data_ptr() % 2:
            raise UnsupportedError(
                f"backend 'triton' cannot run this call: cache.{name} must begin at an even address"
            )


def aligned(scale: Tensor) -> Tensor:
    """Dense, and where int4_decode.py can read four of 16 bits at once."""
    scale = scale.contiguous()
    return scale.clone() if scale.data_ptr() % 8 else scale


def dequantised(call: Call, query: Tensor, cache: KVCache, tables: Tensor, lens: Tensor) -> KVCache:
    """The keys and values in the query's dtype, a block for each entry of the tables."""
    rows = {"key": call.head_dim, "value": call.out_dim}
    made = {}
    for name, columns in rows.items():
        plane, scale = getattr(cache, name), getattr(cache, f"{name}_scale").contiguous()
        shape = call.num_seqs * call.max_blocks, *plane.shape[1:3], columns
        made[name] = query.new_empty(shape)
        started = dequantise_launch(call, name, tables.stride(0))
        _start(dequantise_kernel, Held(plane, scale, tables, lens), started, made[name])
    return KVCache(**made)


BACKEND = Backend("triton", launch.SUPPORTS, run, refusals, plan=plan)


def _start(kernel, arrays, plan: Launch, outs: Results):
    kernel[plan.grid](
        arrays,
        results=outs,
        **plan.scalars,
        **plan.constants,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        maxnreg=plan.most_registers,
        enable_fp_fusion=plan.contracts,
    )


@functools.cache
def _device(device) -> Device:
    if device.type != "cuda":
        return Device(64, 1 << 20, "mma")  # any will do for Triton's interpreter
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return device_of(num_sms, torch.cuda.get_device_capability(device))

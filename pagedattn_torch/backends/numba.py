"""Paged attention of torch tensors on a CPU by the library's own compiled kernel.

Decode and short queries read the pages in place; prompts and chunks pack them, a tile at a time,
for matrix products. The calling thread works itself, outside the GIL, and threads of a pool help:
as many in all as `torch.get_num_threads()` said when the step was prepared.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagedattn import KVCache
from pagedattn._arrays.memory import address
from pagedattn._dispatch.backend import Backend
from pagedattn._dispatch.call import Call
from pagedattn._kernels.cpu import compiled, thread_pool
from pagedattn._kernels.cpu.call_args import CALL_ARGS, NO_WINDOW
from pagedattn.backends.numba.support import (
    SUPPORTS,
    dtype_of,
    dtypes_of,
    itemsizes,
    longest,
    most_heads,
)
from pagedattn.backends.numba.support import numbers as numbers_of
from pagedattn.backends.numba.support import refusals as refusals_of
from pagedattn.batch.metadata import Sequences
from pagedattn.cache.quantise import as_read, of_tokens, scale_of_values

from ..uncompiled import require_unrecorded


class Plan(NamedTuple):
    """What the layers of a step share.

    Fields:
      args: the bytes of the struct that the kernel takes, without the addresses of a layer's
        arrays. (NumPy copies structs field by field, which takes 20 us.)
      kept: the arrays whose addresses it has.
      task: the address of the machine code for the call's dtypes.
    """

    args: bytes
    kept: tuple[Any, ...]
    task: int


def refusals(call: Call) -> list[str]:
    reasons, strides = refusals_of(call), [plane[3] for plane in call.strides[1:] if plane]
    if {*strides} == {1}:
        return reasons
    return [*reasons, f"the cache must have stride 1 along head_dim, got {(*strides,)}"]


def plan(call: Call, batch: Sequences) -> Plan:
    tables, lens = batch.block_tables.contiguous(), batch.seq_lens.contiguous()
    starts = batch.query_start_loc.contiguous()
    struct, numbers = _of_call(call)
    args, task = _writable(struct), compiled.task(*dtypes_of(call)).address
    args["threads"] = torch.get_num_threads()
    _point(args, tables=tables, seq_lens=lens, starts=starts)
    tree: tuple[Tensor, ...] = ()
    if batch.tree is not None:
        tree = batch.tree.depths.contiguous(), batch.tree.ancestors.contiguous()
        _point(args, depths=tree[0], ancestors=tree[1])
        args["words"] = tree[1].shape[1]
    if call.longest_query > longest(call):
        args["prefill"] = compiled.prefill(*dtypes_of(call)).address
    return Plan(args.tobytes(), (tables, lens, starts, numbers, *tree), task)


def run(
    call: Call,
    query: Tensor,
    cache: KVCache,
    plan: Plan,
    *,
    bias: Tensor | None = None,
    selection: Tensor | None = None,
):
    """out and lse of a call; every element is written by the kernel."""
    require_unrecorded()
    given = query
    if call.cache_dtype is not None:
        given = query.to(getattr(torch, dtype_of(call))).contiguous()
    out = given.new_empty(call.out_shape)
    lse = query.new_empty(call.lse_shape, dtype=torch.float32) if call.return_lse else None
    args, value = _writable(plan.args), cache.key if cache.value is None else cache.value
    _point(args, query=given, key=cache.key, value=value, out=out)
    if lse is not None:
        _point(args, lse=lse)
    if bias is not None:
        bias = bias.to(torch.float32).contiguous()
        _fill(args, _bias(bias))
    if selection is not None:
        selection = selection.contiguous()
        _fill(args, {"num_selected": selection.shape[2]})
        _point(args, selection=selection)
    scales = {"key_scale": cache.key_scale, "value_scale": scale_of_values(cache)}
    kept = {
        name: as_read(scale).contiguous() for name, scale in scales.items() if scale is not None
    }
    for name, scale in kept.items():
        _fill(args, _scale(name, scale))
    thread_pool.attention().ctypes(thread_pool.pool(), args.ctypes.data, plan.task)
    return out.to(query.dtype), lse


BACKEND = Backend("numba", SUPPORTS, run, refusals, plan=plan)


def _fill(args: np.ndarray, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        args[name] = value


def _point(args: np.ndarray, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        args[name] = address(name, tensor)


@functools.lru_cache(256)  # the steps of a model are of a few sizes
def _of_call(call: Call) -> tuple[bytes, np.ndarray]:
    """The struct with what follows from the call, and the numbers that it has the address of."""
    args, numbers = np.zeros(1, CALL_ARGS), numbers_of(call)
    _fill(args, _sizes(call) | _strides(call) | _options(call, numbers))
    return args.tobytes(), numbers


def _writable(struct: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(struct), CALL_ARGS)


def _sizes(call: Call) -> dict[str, int]:
    names = "num_tokens", "num_kv_heads", "group", "head_dim", "num_blocks", "block_size"
    names = *names, "num_seqs", "max_blocks"
    own, of_cache = itemsizes(call)
    sizes = {"value_dim": call.out_dim, "itemsize": own, "cache_itemsize": of_cache}
    sizes["value_columns"] = call.out_dim if call.strides.value else call.head_dim
    return sizes | {name: getattr(call, name) for name in names}


def _strides(call: Call) -> dict[str, int]:
    (query, key, value), (own, of_cache) = call.strides, itemsizes(call)
    if call.cache_dtype:  # `run` makes a dense one of its own
        query = call.num_heads * call.head_dim, call.head_dim
    strides = {"query_token": query[0] * own, "query_head": query[1] * own}
    for name, plane in (("key", key), ("value", value or key)):
        axes = zip(("block", "slot", "head"), plane[:3], strict=True)
        strides |= {f"{name}_{axis}": stride * of_cache for axis, stride in axes}
    return strides | {"table_row": 4 * call.max_blocks}


def _bias(bias: Tensor) -> dict[str, int]:
    """A bias of one head is that of all."""
    token, head, _ = bias.stride()
    strides = {"bias_token": 4 * token, "bias_head": 4 * head if bias.shape[1] > 1 else 0}
    return strides | {"bias": address("bias", bias), "bias_columns": bias.shape[2]}


def _scale(name: str, scale: Tensor) -> dict[str, int]:
    """One number is that of all heads."""
    if of_tokens(scale):
        return {f"{name}s": address(name, scale)}
    return {name: address(name, scale), f"{name}_head": 4 * sum(scale.stride())}


def _options(call: Call, numbers: np.ndarray) -> dict[str, Any]:
    return {
        "scale": numbers[0],
        "soft_cap": numbers[1],
        "unit": numbers[2],
        "slopes": numbers[3:].ctypes.data if len(numbers) > 3 else 0,
        "causal": call.spec.causal,
        "window": NO_WINDOW if call.window is None else call.window,
        "longest": longest(call),
        "most_heads": most_heads(call),
    }

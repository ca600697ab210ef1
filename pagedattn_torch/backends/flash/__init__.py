"""Paged attention by flash-attn-4 on Hopper and Blackwell: pages in place, any queries.

Nothing here waits for the device or depends on its values. What the kernels would do wrong, by
their source, is kept from them:

- A page as long as a tile of keys is loaded whole, past the end of its sequence, and a NaN there
  survives a weight of 0. So pages are halved until no tile is so short (`SHORT`); row by row only
  the keys of the sequence are loaded.
- Keys behind a window are loaded with their tile. So with a window a page is one token, and tables
  begin at the first key that a query sees.
- Rows that belong to no sequence are not written. So the padding is a sequence of its own, with no
  keys, whose rows the kernels set to 0 and -inf.
- A cache whose strides are no multiples of 16 bytes would be copied whole. It is refused.
- Head sizes whose rows do not divide a tile would be loaded past it. They are refused.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pagedattn import KVCache
from pagedattn._arrays.int32 import nondecreasing
from pagedattn._arrays.namespace import arange, namespace
from pagedattn._dispatch.backend import Backend
from pagedattn._dispatch.call import Call
from pagedattn.batch.metadata import Sequences

from ..gather import first_keys
from .forward import forward, why_unusable

SUPPORTS = frozenset(
    {"scale", "causal", "sliding_window", "logits_soft_cap", "sinks", "return_lse"}
)
HALVES = ("bfloat16", "float16")
HEAD_DIMS = {9: (64, 128, 192, 256), 10: (64, 128), 11: (64, 128)}  # by the GPU's generation
ALIGNED = 8  # elements in 16 bytes
SHORT = 64  # no tile has fewer keys


class Plan(NamedTuple):
    """What the layers of a step share; the last sequence is the padding, which has no keys."""

    starts: Int[Any, "num_seqs_plus_2"]
    lens: Int[Any, "num_seqs_plus_1"]
    tables: Int[Any, "num_seqs_plus_1 pages"]


def refusals(call: Call) -> list[str]:
    """Why the kernels cannot run a call."""
    generation = torch.cuda.get_device_capability()[0] if call.device == "cuda" else 9
    if generation not in HEAD_DIMS:
        return [f"flash reads pages on Hopper and Blackwell, not on generation {generation}"]
    reasons = []
    if call.dtype not in HALVES:
        reasons.append(f"flash takes {' and '.join(HALVES)}, not {call.dtype}")
    if call.head_dim not in HEAD_DIMS[generation]:
        allowed = ", ".join(map(str, HEAD_DIMS[generation]))
        reasons.append(f"head_dim must be one of {allowed}, got {call.head_dim}")
    return reasons + [f"the cache's {reason}" for reason in _bad_strides(call)]


def _bad_strides(call: Call) -> list[str]:
    planes = {call.strides.key, call.strides.value}
    reasons = []
    if any(part[3] != 1 or any(s % ALIGNED for s in part[:3]) for part in planes):
        reasons.append(f"strides must be multiples of {ALIGNED}, that of head_dim 1, got {planes}")
    if page_size(call) < call.block_size and any(
        block != call.block_size * slot for block, slot, *_ in planes
    ):
        reasons.append(
            f"blocks must follow one another in memory for a sliding_window, or for block_size "
            f"{call.block_size}, got strides {planes}"
        )
    return reasons


def slower_because(call: Call) -> list[str]:
    return ["it is not measured to be ahead of the backends behind it"]


def page_size(call: Call) -> int:
    """The slots of a page as the kernels see it, which divide a block.

    >>> from pagedattn import AttentionSpec
    >>> from pagedattn.extend import Strides
    >>> call = Call(num_tokens=5, num_heads=8, num_kv_heads=2, head_dim=64, num_blocks=9,
    ...             block_size=128, num_seqs=2, max_blocks=3, max_query_len=4, dtype="bfloat16",
    ...             device="cuda", strides=Strides((), (), ()), spec=AttentionSpec())
    >>> page_size(call)
    32
    """
    size = call.block_size if call.window is None else 1
    while size >= SHORT and size % 2 == 0:
        size //= 2
    return size


def plan(call: Call, batch: Sequences) -> Plan:
    """Of arrays of any framework."""
    # Inside jit nobody has checked the batch: nothing in it may lead out of the arrays.
    starts = nondecreasing(_clipped(batch.query_start_loc, call.num_tokens))
    lens = _clipped(batch.seq_lens, call.capacity)
    if call.window is None:
        tables = _pages(call, batch)
    else:
        first = _clipped(first_keys(call, batch), call.capacity)
        tables = _slots(call, batch, first)
        lens = _clipped(lens - first, tables.shape[1])
    join = namespace(lens).concatenate
    padding = starts[:1] * 0 + call.num_tokens, lens[:1] * 0, tables[:1]
    return Plan(*(join(pair) for pair in zip((starts, lens, tables), padding, strict=True)))


def _pages(call: Call, batch: Sequences) -> Int[Any, "num_seqs pages"]:
    """The pages of each sequence's blocks."""
    blocks = _clipped(batch.block_tables, call.num_blocks - 1)
    parts = call.block_size // page_size(call)
    if parts == 1:
        return blocks
    return (blocks[..., None] * parts + arange(parts, blocks)).reshape(call.num_seqs, -1)


def _slots(
    call: Call, batch: Sequences, first: Int[Any, "num_seqs"]
) -> Int[Any, "num_seqs {call.max_keys}"]:
    """The slots of each sequence's keys, from the first that a query sees."""
    numbers = first[:, None] + arange(call.max_keys, first)
    columns = _clipped(numbers // call.block_size, call.max_blocks - 1)
    blocks = batch.block_tables[arange(call.num_seqs, first)[:, None], columns]
    return _clipped(blocks, call.num_blocks - 1) * call.block_size + numbers % call.block_size


def _clipped(numbers: Int[Any, "*n"], most: int) -> Int[Any, "*n"]:
    return namespace(numbers).clip(numbers, 0, most)


def run(
    call: Call,
    query: Float[Tensor, "num_tokens num_heads head_dim"],
    cache: KVCache,
    plan: Plan,
    *,
    sinks: Float[Tensor, "num_heads"] | None = None,
    out: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[
    Float[Tensor, "num_tokens num_heads head_dim"], Float[Tensor, "num_tokens num_heads"] | None
]:
    key, value = (plane.view(-1, page_size(call), *plane.shape[2:]) for plane in cache.planes)
    result = query.new_empty(call.out_shape) if out is None else out[0]
    lse = query.new_empty(call.lse_shape[::-1], dtype=torch.float32) if call.return_lse else None
    reach = None if call.window is None else call.window - 1
    forward()(
        query,
        key,
        value,
        cu_seqlens_q=plan.starts,
        seqused_k=plan.lens,
        page_table=plan.tables,
        softmax_scale=call.scale,
        causal=call.spec.causal,
        softcap=call.spec.logits_soft_cap,
        window_size_left=reach,
        window_size_right=0 if call.spec.causal else reach,
        learnable_sink=None if sinks is None else sinks.float().contiguous(),
        return_lse=call.return_lse,
        out=result,
        lse=lse,
    )
    if lse is not None and sinks is not None:  # the padding's is that of the sinks alone
        lse.masked_fill_(arange(call.num_tokens, lse) >= plan.starts[-2], -torch.inf)
    return result, None if lse is None else lse.T


BACKEND = Backend(
    "flash",
    SUPPORTS,
    run,
    refusals,
    slower_because=slower_because,
    plan=plan,
    missing=lambda: why_unusable(),
    takes_out=True,
    plans_any=True,
)

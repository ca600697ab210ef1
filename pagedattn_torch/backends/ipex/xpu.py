"""The extension's operators on an XPU, written by its source and documents: never run on one.

Its two operators want two layouts of the cache, and neither is a view of the other:
- `single_query_cached_kv_attention`, for one query a sequence: slots last, blocks of 16 or 32: a
  cache made by `empty_kv_cache` in the order (0, 1, 3, 4, 2).
- `flash_attn_varlen_func`, for any queries: the logical order, blocks of 64 or 128.

A cache is read where it lies, by the operator that its layout fits, or the call is refused.
Operators are called by keywords only: the order of their arguments differs from the CPU's.
Nothing here waits for the device, though the extension does in places.

By their source, the operators keep two promises of the library only in part, and no shape shows it.
What lies past a sequence's end or behind a window is multiplied by 0, so that NaN there spreads.
Where queries outnumber keys, causal ones in a tile with one before all keys see too much.
"""

import dataclasses

import torch
from torch import Tensor
from torch.nn.functional import pad

from pagedattn.call import Call, is_dense

from ...bias import slopes_on
from .operators import paged_operators

DECODE_BLOCKS, DECODE_HEAD_DIM = (16, 32), 256
PACKED_BLOCKS, PACKED_HEAD_DIM = (64, 128), 512
# Up to this bound the operator takes a kernel that is not told the soft-cap.
CAPLESS_KEYS = 512


def refusals(call: Call) -> list[str]:
    if _decodes(call):
        return []
    if _packs(call):
        # They are applied to a key's position, which is its distance but for a constant if causal.
        two_sided = call.spec.alibi_slopes and not call.spec.causal
        return ["alibi_slopes with causal=False"] if two_sided else []
    return [
        f"on an XPU ipex reads block_size {PACKED_BLOCKS} with head_dim to {PACKED_HEAD_DIM} in "
        f"the logical layout, or, for one query a sequence without sliding_window, block_size "
        f"{DECODE_BLOCKS} with head_dim to {DECODE_HEAD_DIM} and slots last in memory; got "
        f"block_size {call.block_size}, head_dim {call.head_dim}, max_query_len "
        f"{call.longest_query}, strides {call.strides.key}"
    ]


def attend(call: Call, query: Tensor, cache, batch, out: Tensor) -> None:
    """Writes the rows of out that belong to a sequence; anything where a query sees no key."""
    operator = _decode if _decodes(call) else _packed
    operator(call, query.contiguous(), cache, _bounded(call, batch), out)


def _bounded(call, batch):
    """The batch with lengths that, whatever they were, do not lead out of the arrays."""
    starts = batch.query_start_loc.clamp(0, call.num_tokens).cummax(0).values
    seq_lens = batch.seq_lens.clamp(0, call.capacity)
    return dataclasses.replace(batch, query_start_loc=starts, seq_lens=seq_lens)


def _decodes(call) -> bool:
    return (
        _is_cache_in_order(call, (0, 2, 3, 1))  # slots last
        and call.longest_query == 1
        and call.window is None  # ignored by the operator
        and call.block_size in DECODE_BLOCKS
        and call.head_dim <= DECODE_HEAD_DIM
    )


def _packs(call) -> bool:
    logical = _is_cache_in_order(call, (0, 1, 2, 3))
    return logical and call.block_size in PACKED_BLOCKS and call.head_dim <= PACKED_HEAD_DIM


def _is_cache_in_order(call, axes) -> bool:
    """Whether the cache's planes lie densely in memory with their axes in an order."""
    shape = [call.cache_shape[axis] for axis in axes]
    planes = call.strides.key, call.strides.value
    return all(is_dense(shape, [strides[axis] for axis in axes]) for strides in planes)


def _decode(call, query, cache, batch, out) -> None:
    starts = batch.query_start_loc
    rows = query[starts[:-1].clamp(0, call.num_tokens - 1).long()]
    result = torch.empty_like(rows)
    heads = torch.arange(call.num_heads, dtype=torch.int32, device=query.device) // call.group
    paged_operators().single_query_cached_kv_attention(
        output=result,
        query=rows,
        key_cache=cache.key.permute(0, 2, 3, 1),
        value_cache=cache.value.permute(0, 2, 3, 1),
        head_mapping=heads,
        scale=call.scale,
        block_tables=_tables(call, batch),
        context_lens=batch.seq_lens,
        block_size=call.block_size,
        max_context_len=max(call.capacity, CAPLESS_KEYS + 1),
        alibi_slopes=_slopes(call, query),
        softcap=call.spec.logits_soft_cap or -1.0,
    )
    # Sequences without a query write to a row past the tokens.
    room = torch.cat([out, out.new_zeros(1, *out.shape[1:])])
    live = starts.diff() > 0
    room.index_copy_(0, torch.where(live, starts[:-1], len(out)).long(), result)
    out.copy_(room[:-1])


def _packed(call, query, cache, batch, out) -> None:
    reach = -1 if call.window is None else call.window - 1
    paged_operators().flash_attn_varlen_func(
        output=out,
        query=query,
        key_cache=cache.key,
        value_cache=cache.value,
        cu_seqlens_q=batch.query_start_loc,
        cu_seqlens_kv=pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
        max_seqlen_q=call.longest_query,
        max_seqlen_kv=max(call.capacity, reach + 1),  # as on a CPU
        scale=call.scale,
        is_cusal=call.spec.causal,
        block_tables=_tables(call, batch),
        alibi_slopes=_slopes(call, query),
        window_size_left=reach,
        window_size_right=0 if call.spec.causal and reach >= 0 else reach,
        softcap=call.spec.logits_soft_cap or -1.0,
    )


def _tables(call, batch) -> Tensor:
    """Entries past a sequence's end may be anything; in range, they cannot lead astray."""
    return batch.block_tables.clamp(0, call.num_blocks - 1).contiguous()


def _slopes(call, query) -> Tensor | None:
    slopes = call.spec.alibi_slopes
    return None if slopes is None else slopes_on(slopes, query.device)

"""The extension's operators on an XPU. Written from its source and documents, never run on one.

The two operators want two memory layouts of the cache, neither of which is a view of the other:
- `single_query_cached_kv_attention`, for one query a sequence: slots last, blocks of 16 or 32. Such
  a cache is made by `empty_kv_cache` with the order (0, 1, 3, 4, 2).
- `flash_attn_varlen_func`, for any queries: the logical order, blocks of 64 or 128.

A cache is read in place by the operator that fits its layout. Of any other, and of packed keys, the
keys that the call may see are copied to pages for the second one. Operators are called by keywords
only, since the order of their arguments differs from the CPU's. Nothing here waits for the device,
though the extension itself does in places.

By their source, the operators break two promises of this library, for values that no shape shows:
- In a cache that is read in place, keys past a sequence's end or behind a window are read and get a
  weight of 0: NaN there spreads.
- With more queries than keys, a causal query sees too much if it is computed in one tile with a
  query that stands before all keys.
"""

import dataclasses

import torch
from torch import Tensor
from torch.nn.functional import pad

from pagedattn import KVCache
from pagedattn._arrays.devices import is_dense
from pagedattn._dispatch.call import Call

from ..bias import slopes_on
from ..gather import gather_pages
from .operators import paged_operators

DECODE_BLOCKS, DECODE_HEAD_DIM = (16, 32), 256
PACKED_BLOCKS, PACKED_HEAD_DIM = (64, 128), 512
# Up to this bound on lengths the operator runs a kernel to which it does not pass the soft-cap.
CAPLESS_KEYS = 512


def refusals(call: Call) -> list[str]:
    if _decodes(call):
        return []
    reasons = []
    if call.head_dim > PACKED_HEAD_DIM:
        reasons.append(f"on an XPU ipex takes head_dim to {PACKED_HEAD_DIM}, not {call.head_dim}")
    if lacks_alibi(call):
        reasons.append("alibi_slopes with causal=False")
    return reasons


def slower_because(call: Call) -> list[str]:
    reasons = ["on an XPU it has never been run: it is written from the extension's source"]
    if call.block_size > 1 and not (_decodes(call) or _in_pages(call)):
        reasons.append(
            f"it copies the keys of every call, since in place it reads block_size {PACKED_BLOCKS} "
            "in the logical layout, or, for one query a sequence without sliding_window, "
            f"block_size {DECODE_BLOCKS} with slots last in memory"
        )
    return reasons


def lacks_alibi(call: Call) -> bool:
    """Whether ALiBi would be wrong: the operators add slope times a key's position.

    For causal queries that is the distance up to a constant for each query, which the softmax
    cancels; for others it is not.
    """
    return bool(call.spec.alibi_slopes) and not (call.spec.causal or _decodes(call))


def attend(call: Call, query: Tensor, cache, batch, out: Tensor) -> None:
    """Writes the rows of out that belong to a sequence; garbage where a query sees no key."""
    operator = _decode if _decodes(call) else _packed
    batch = _bounded(call, batch)
    if operator is _packed and not _in_pages(call):
        cache, batch = _paged(call, cache, batch)
    operator(call, query.contiguous(), cache, batch, out)


def _bounded(call, batch):
    """The batch with starts and lengths clamped, so that they do not lead out of the arrays."""
    starts = batch.query_start_loc.clamp(0, call.num_tokens).cummax(0).values
    seq_lens = batch.seq_lens.clamp(0, call.capacity)
    return dataclasses.replace(batch, query_start_loc=starts, seq_lens=seq_lens)


def _decodes(call) -> bool:
    return (
        _is_cache_in_order(call, (0, 2, 3, 1))  # slots last
        and call.longest_query == 1
        and call.window is None  # the operator would ignore it
        and call.block_size in DECODE_BLOCKS
        and call.head_dim <= DECODE_HEAD_DIM
    )


def _in_pages(call) -> bool:
    return call.block_size in PACKED_BLOCKS and _is_cache_in_order(call, (0, 1, 2, 3))


def _paged(call, cache, batch):
    """The keys that each sequence may see, copied to pages of its own; 0 where no query looks."""
    size, seen = PACKED_BLOCKS[0], gather_pages(call, cache, batch)
    room = -seen.positions.shape[1] % size
    key, value = (
        pad(x, (0, 0, 0, 0, 0, room)).unflatten(1, (-1, size)) for x in (seen.key, seen.value)
    )
    count = key.shape[:2].numel()
    tables = torch.arange(count, device=key.device, dtype=torch.int32).view(len(key), -1)
    lens = seen.lens.clamp(0, seen.positions.shape[1])
    pages = KVCache(key.flatten(0, 1), value.flatten(0, 1))
    return pages, dataclasses.replace(batch, block_tables=tables, seq_lens=lens)


def _is_cache_in_order(call, axes) -> bool:
    """Whether keys and values lie densely in memory with their axes in the given order."""
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
        block_tables=_tables(call.num_blocks, batch),
        context_lens=batch.seq_lens,
        block_size=call.block_size,
        max_context_len=max(call.capacity, CAPLESS_KEYS + 1),
        alibi_slopes=_slopes(call, query),
        softcap=call.spec.logits_soft_cap or -1.0,
    )
    # Sequences without a query write to a spare row, which is thrown away.
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
        # Where a window reaches past this bound it is dropped, as on a CPU.
        max_seqlen_kv=max(batch.block_tables.shape[1] * cache.key.shape[1], reach + 1),
        scale=call.scale,
        is_cusal=call.spec.causal,
        block_tables=_tables(len(cache.key), batch),
        alibi_slopes=_slopes(call, query),
        window_size_left=reach,
        window_size_right=0 if call.spec.causal and reach >= 0 else reach,
        softcap=call.spec.logits_soft_cap or -1.0,
    )


def _tables(num_blocks: int, batch) -> Tensor:
    """Block tables clamped to the cache, since entries past a sequence's end may be anything."""
    return batch.block_tables.clamp(0, num_blocks - 1).contiguous()


def _slopes(call, query) -> Tensor | None:
    slopes = call.spec.alibi_slopes
    return None if slopes is None else slopes_on(slopes, query.device)

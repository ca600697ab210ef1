"""The extension's operators on an XPU, written by its source and documents: never run on one.

Its two operators want two layouts of the cache, and neither is a view of the other:
- `single_query_cached_kv_attention`, for one query a sequence: slots last, blocks of 16 or 32: a
  cache made by `empty_kv_cache` in the order (0, 1, 3, 4, 2).
- `flash_attn_varlen_func`, for any queries: the logical order, blocks of 64 or 128.

A cache is read where it lies, by the operator that its layout fits, or the call is refused. Packed
keys, which are blocks of one token, are copied to pages.
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

from pagedattn import KVCache

from .device_bias import slopes_on
from .ipex_ops import paged_operators

DECODE_BLOCKS, DECODE_HEAD_DIM = (16, 32), 256
PACKED_BLOCKS, PACKED_HEAD_DIM = (64, 128), 512
# Up to this bound the operator takes a kernel that is not told the soft-cap.
CAPLESS_KEYS = 512


def unsupported(cache, batch, spec) -> list[str]:
    if _decodes(cache, batch, spec):
        return []
    if _packs(cache):
        return ["alibi_slopes with causal=False"] if lacks_alibi(cache, batch, spec) else []
    return [
        f"on an XPU ipex reads block_size {PACKED_BLOCKS} with head_dim to {PACKED_HEAD_DIM} in "
        f"the logical layout, or, for one query a sequence without sliding_window, block_size "
        f"{DECODE_BLOCKS} with head_dim to {DECODE_HEAD_DIM} and slots last in memory; got "
        f"block_size {cache.block_size}, head_dim {cache.head_dim}, max_query_len "
        f"{batch.max_query_len}, strides {cache.key.stride()}"
    ]


def lacks_alibi(cache, batch, spec) -> bool:
    """Slopes go by a key's position, which is its distance but for a constant, if causal."""
    return bool(spec.alibi_slopes) and not (spec.causal or _decodes(cache, batch, spec))


def attend(query: Tensor, cache, batch, spec, out: Tensor) -> None:
    """Writes the rows of out that belong to a sequence; anything where a query sees no key."""
    operator = _decode if _decodes(cache, batch, spec) else _packed
    batch = _bounded(batch, len(query))
    if cache.block_size == 1:
        cache, batch = _paged(cache, batch)
    operator(query.contiguous(), cache, batch, spec, out)


def _bounded(batch, num_tokens: int):
    """The batch with lengths that, whatever they were, do not lead out of the arrays."""
    starts = batch.query_start_loc.clamp(0, num_tokens).cummax(0).values
    seq_lens = batch.seq_lens.clamp(0, _capacity(batch))
    return dataclasses.replace(batch, query_start_loc=starts, seq_lens=seq_lens)


def _decodes(cache, batch, spec) -> bool:
    slots_last = all(
        plane.permute(0, 2, 3, 1).is_contiguous() for plane in (cache.key, cache.value)
    )
    return (
        slots_last
        and batch.max_query_len == 1
        and spec.sliding_window is None  # ignored by the operator
        and cache.block_size in DECODE_BLOCKS
        and cache.head_dim <= DECODE_HEAD_DIM
    )


def _packs(cache) -> bool:
    contiguous = cache.key.is_contiguous() and cache.value.is_contiguous()
    readable = cache.block_size == 1 or (contiguous and cache.block_size in PACKED_BLOCKS)
    return readable and cache.head_dim <= PACKED_HEAD_DIM


def _paged(cache, batch):
    """Packed keys in pages, so many a sequence as the longest may need, and 0 behind its end."""
    size = PACKED_BLOCKS[0]
    count = -(-batch.max_blocks // size)
    positions = torch.arange(count * size, device=batch.seq_lens.device)
    rows = batch.block_tables.index_select(1, positions.clamp(max=batch.max_blocks - 1))
    rows = rows.clamp(0, cache.num_blocks - 1).flatten()
    behind = (positions >= batch.seq_lens[:, None]).view(-1, 1, 1)
    key, value = (
        plane.flatten(0, 1).index_select(0, rows).masked_fill_(behind, 0).unflatten(0, (-1, size))
        for plane in (cache.key, cache.value)
    )
    tables = torch.arange(len(key), device=rows.device, dtype=torch.int32).view(-1, count)
    return KVCache(key, value), dataclasses.replace(batch, block_tables=tables, block_size=size)


def _decode(query, cache, batch, spec, out) -> None:
    starts = batch.query_start_loc
    rows = query[starts[:-1].clamp(0, len(query) - 1).long()]
    result = torch.empty_like(rows)
    group = query.shape[1] // cache.num_kv_heads
    heads = torch.arange(query.shape[1], dtype=torch.int32, device=query.device) // group
    paged_operators().single_query_cached_kv_attention(
        output=result,
        query=rows,
        key_cache=cache.key.permute(0, 2, 3, 1),
        value_cache=cache.value.permute(0, 2, 3, 1),
        head_mapping=heads,
        scale=spec.scale_for(query.shape[2]),
        block_tables=_tables(cache, batch),
        context_lens=batch.seq_lens,
        block_size=cache.block_size,
        max_context_len=max(_capacity(batch), CAPLESS_KEYS + 1),
        alibi_slopes=_slopes(query, spec),
        softcap=spec.logits_soft_cap or -1.0,
    )
    # Sequences without a query write to a row past the tokens.
    room = torch.cat([out, out.new_zeros(1, *out.shape[1:])])
    live = starts.diff() > 0
    room.index_copy_(0, torch.where(live, starts[:-1], len(out)).long(), result)
    out.copy_(room[:-1])


def _packed(query, cache, batch, spec, out) -> None:
    reach = -1 if spec.sliding_window is None else spec.sliding_window - 1
    paged_operators().flash_attn_varlen_func(
        output=out,
        query=query,
        key_cache=cache.key,
        value_cache=cache.value,
        cu_seqlens_q=batch.query_start_loc,
        cu_seqlens_kv=pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
        max_seqlen_q=min(batch.max_query_len, len(query)),
        max_seqlen_kv=max(_capacity(batch), reach + 1),  # as on a CPU
        scale=spec.scale_for(query.shape[2]),
        is_cusal=spec.causal,
        block_tables=_tables(cache, batch),
        alibi_slopes=_slopes(query, spec),
        window_size_left=reach,
        window_size_right=0 if spec.causal and reach >= 0 else reach,
        softcap=spec.logits_soft_cap or -1.0,
    )


def _tables(cache, batch) -> Tensor:
    """Entries past a sequence's end may be anything; in range, they cannot lead astray."""
    return batch.block_tables.clamp(0, cache.num_blocks - 1).contiguous()


def _capacity(batch) -> int:
    return batch.max_blocks * batch.block_size


def _slopes(query, spec) -> Tensor | None:
    return None if spec.alibi_slopes is None else slopes_on(spec.alibi_slopes, query.device)

"""xFormers' masks, put together from device tensors and static bounds.

xFormers' own constructors of masks want lists of lengths, and reading those would wait for the
device. The lists inside a mask are read only for rectangles, whose lengths are known from shapes.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from pagedattn._dispatch.call import Call
from pagedattn.batch.metadata import Sequences

from .fmha import fmha


def paged_mask(call: Call, batch: Sequences):
    """The mask of a rectangle of right-aligned queries over the pages, read in place."""
    masks = fmha().attn_bias
    kind = (
        masks.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
        if call.spec.causal
        else masks.PagedBlockDiagonalPaddedKeysMask
    )
    starts = _even_starts(call, batch, call.longest_query)
    queries = masks._SeqLenInfo(
        seqstart=starts[0],
        seqstart_py=starts[1],
        max_seqlen=call.longest_query,
        min_seqlen=call.longest_query,
    )
    return kind(
        q_seqinfo=queries,
        k_seqinfo=_padded_keys(call, batch, batch.seq_lens, call.capacity),
        block_tables=batch.block_tables.clamp(0, call.num_blocks - 1).contiguous(),
        page_size=call.block_size,
    )


def packed_mask(call: Call, batch: Sequences, key_lens: Int[Tensor, "num_seqs"], padding: int):
    """The mask of packed queries over gathered keys, padded to `padding` for each sequence."""
    masks = fmha().attn_bias
    queries = masks._SeqLenInfo(
        seqstart=batch.query_start_loc.clamp(0, call.num_tokens),
        seqstart_py=[0] * call.num_seqs + [call.num_tokens],
        # FlashAttention reads a bound of 1 as a promise that every sequence has exactly one query.
        max_seqlen=max(2, call.longest_query),
        min_seqlen=0,
    )
    infos = {"q_seqinfo": queries, "k_seqinfo": _padded_keys(call, batch, key_lens, padding)}
    if call.window is not None:
        kind = masks.BlockDiagonalCausalLocalAttentionPaddedKeysMask
        return kind(**infos, _window_size=call.window)
    if call.spec.causal:
        return masks.BlockDiagonalCausalWithOffsetPaddedKeysMask(**infos)
    return masks.BlockDiagonalPaddedKeysMask(**infos)


def _even_starts(
    call: Call, batch: Sequences, length: int
) -> tuple[Int[Tensor, "num_seqs_plus_1"], list[int]]:
    stop = (call.num_seqs + 1) * length
    starts = torch.arange(0, stop, length, device=batch.seq_lens.device, dtype=torch.int32)
    return starts, list(range(0, stop, length))


def _padded_keys(call: Call, batch: Sequences, lens: Int[Tensor, "num_seqs"], padding: int):
    starts, starts_py = _even_starts(call, batch, padding)
    return fmha().attn_bias._PaddedSeqLenInfo(
        seqstart=starts,
        seqstart_py=starts_py,
        max_seqlen=padding,
        min_seqlen=0,
        seqlen=lens.clamp(0, padding),
        seqlen_py=[padding] * call.num_seqs,
        padding=padding,
    )

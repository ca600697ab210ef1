"""Metadata converted to batches of the core and back; tensors share their memory."""

from collections.abc import Sequence

import torch

from pagedattn import BatchMetadata, InvalidInputError, UnsupportedError, make_batch
from pagedattn._arrays.inspect import known
from pagedattn.batch import validate as validate_batch
from pagedattn.batch.indices import token_positions
from pagedattn.batch.make_batch import Lengths
from pagedattn.batch.packed import packed_batch

from ...arrays import int32, tensor
from ..attention_type import AttentionType
from .lengths import nondecreasing_starts


def paged(meta, block_size: int, attn_type: AttentionType) -> BatchMetadata:
    """The batch for keys in the cache, of type DECODER or ENCODER_DECODER."""
    require_fields(meta, attn_type, paged=True)
    decoder = attn_type is AttentionType.DECODER
    starts, num_tokens = int32(meta.query_start_loc), meta.num_query_tokens(attn_type)
    seq_lens = int32(meta.seq_lens_tensor if decoder else meta.encoder_seq_lens_tensor)
    tables = meta.block_tables if decoder else meta.cross_block_tables
    lens = meta.seq_lens if decoder else meta.encoder_seq_lens
    _require_rows("block_tables" if decoder else "cross_block_tables", tables, len(seq_lens), lens)
    # Slots in metadata for cross attention are the encoder tokens', which this batch does not hold.
    slots = meta.slot_mapping if decoder else None
    nowhere = torch.full((num_tokens,), -1, dtype=torch.int32, device=starts.device)
    return BatchMetadata(
        block_tables=int32(tables),
        seq_lens=seq_lens,
        query_start_loc=starts,
        slot_mapping=nowhere if slots is None else int32(slots),
        positions=token_positions(starts, seq_lens, num_tokens),
        block_size=block_size,
        max_query_len=meta.max_query_len,
    )


def _require_rows(name, tables, num_seqs, lens):
    got = None if tables is None else list(tables.shape)
    if not (got is not None and len(got) == 2 and got[0] == num_seqs):
        raise InvalidInputError(
            f"{name} must be [{num_seqs}, max_blocks], a row for each sequence, got {got}"
        )
    if not bool(got and got[1]) and any(lens or ()):
        raise InvalidInputError(
            f"{name} must hold the blocks of keys that are not given, got none for lengths {lens}"
        )


def packed(meta, attn_type: AttentionType) -> BatchMetadata:
    """The batch whose keys are the packed tokens of this step, as blocks of one token.

    Raises:
      InvalidInputError: queries should see keys that are not among the tokens of this step.
    """
    require_fields(meta, attn_type, paged=False)
    queries, keys, longest_query, longest_key = _packed_sides(meta, attn_type)
    _require_keys(meta, attn_type)
    num_tokens = meta.num_query_tokens(attn_type)
    num_keys = num_tokens if keys is queries else meta.num_encoder_tokens
    longest_query = _at_most(longest_query, num_tokens)
    longest_key = _at_most(longest_key, num_keys)
    return packed_batch(num_tokens, int32(queries), int32(keys), longest_query, longest_key)


def prefills(meta) -> BatchMetadata:
    """The batch of the prefills over the keys that they bring, without their contexts."""
    starts = int32(meta.query_start_loc[: meta.num_prefills + 1])
    longest = _at_most(meta.max_query_len, meta.num_prefill_tokens)
    return packed_batch(meta.num_prefill_tokens, starts, starts, longest, longest)


def _at_most(longest: int, num_tokens: int | None) -> int:
    """A bound on lengths, which may be far too wide: tables are as wide as it says."""
    return longest if num_tokens is None else min(longest, max(1, num_tokens))


def cached_tokens(meta, attn_type: AttentionType) -> int | None:
    """How many keys of the call are not new; None if the host does not know."""
    own = attn_type in (AttentionType.DECODER, AttentionType.ENCODER_ONLY)
    lens = meta.seq_lens if own else meta.encoder_seq_lens
    new = meta.num_encoder_tokens
    if own:
        new = meta.num_prefill_tokens + meta.num_decode_tokens
        if (starts := known(meta.query_start_loc)) is not None:
            new = int(starts.max(initial=0))  # without a captured graph's padding tokens
    return None if lens is None or new is None else max(0, sum(lens) - new)


def _require_keys(meta, attn_type):
    if attn_type is AttentionType.ENCODER:
        return
    cached = cached_tokens(meta, attn_type)
    if cached:
        raise InvalidInputError(
            f"{attn_type} attention without a cache and block_tables sees only the new tokens, but "
            f"{cached} tokens of its sequences are not among them, by their context_lens"
        )


def _packed_sides(meta, attn_type):
    own = meta.query_start_loc, meta.max_query_len
    encoder = meta.encoder_query_start_loc, meta.max_encoder_seq_len
    queries = encoder if attn_type is AttentionType.ENCODER else own
    keys = own if attn_type in (AttentionType.DECODER, AttentionType.ENCODER_ONLY) else encoder
    return queries[0], keys[0], queries[1], keys[1]


def decoder_fields(batch: BatchMetadata, num_prefills, num_prefill_tokens) -> dict:
    """The fields of metadata that follow from a batch of the decoder's tokens."""
    if batch.tree is not None:
        raise UnsupportedError(
            "parents: the metadata of layers does not have them; pagedattn_torch.paged_attention "
            "takes the batch"
        )
    starts = nondecreasing_starts(int32(tensor("query_start_loc", batch.query_start_loc)))
    if num_prefills is None:
        several = (starts.diff() > 1).nonzero()
        num_prefills = int(several[-1]) + 1 if len(several) else 0
    if num_prefill_tokens is None:
        num_prefill_tokens = int(starts[num_prefills])
    num_tokens = batch.num_tokens if known(starts) is None else int(starts[-1])
    return {
        "num_prefills": num_prefills,
        "num_prefill_tokens": num_prefill_tokens,
        "num_decode_tokens": num_tokens - num_prefill_tokens,
        "slot_mapping": batch.slot_mapping,
        "seq_lens_tensor": batch.seq_lens,
        "block_tables": batch.block_tables,
        "query_start_loc": starts,
        "max_query_len": batch.max_query_len,
    }


def encoder_fields(batch: BatchMetadata) -> dict:
    """The fields of metadata that follow from a batch of encoder tokens."""
    return {
        "encoder_seq_lens_tensor": batch.seq_lens,
        "encoder_query_start_loc": batch.query_start_loc,
        "num_encoder_tokens": batch.num_tokens,
        "cross_slot_mapping": batch.slot_mapping,
        "cross_block_tables": batch.block_tables,
    }


def fields_of_lists(
    query_lens: Lengths,
    context_lens: Lengths,
    block_tables: Sequence[Lengths],
    *,
    block_size: int,
    encoder_lens: Lengths | None,
    cross_block_tables: Sequence[Lengths] | None,
) -> dict:
    """The fields of metadata that follow from lists with one entry a sequence."""
    if (encoder_lens is None) != (cross_block_tables is None):
        raise InvalidInputError(
            "encoder_lens and cross_block_tables must both be given or both be None, got "
            + ("cross_block_tables" if encoder_lens is None else "encoder_lens")
            + " alone"
        )
    batch = make_batch(query_lens, context_lens, block_tables, block_size=block_size)
    contexts = validate_batch.lengths("context_lens", context_lens)
    seq_lens = validate_batch.lengths("query_lens", query_lens) + contexts
    # The lists are given too: the arrays may lie on a GPU, where lengths are never read.
    fields = decoder_fields(batch, None, None) | {"seq_lens": seq_lens.tolist()}
    if encoder_lens is None or cross_block_tables is None:
        return fields
    lens = validate_batch.lengths("encoder_lens", encoder_lens, like=query_lens)
    cached = lens * (contexts > 0)
    encoder = make_batch(lens - cached, cached, cross_block_tables, block_size=block_size)
    return fields | encoder_fields(encoder) | {"encoder_seq_lens": lens.tolist()}


def missing(meta, attn_type: AttentionType, *, paged: bool) -> list[str]:
    """The fields that are None, but needed for a type of attention to keys `paged` or packed."""
    own = () if attn_type is AttentionType.ENCODER else ("seq_lens_tensor",)
    encoder = ("encoder_seq_lens_tensor", "max_encoder_seq_len", "num_encoder_tokens")
    cross = ("encoder_seq_lens_tensor", "cross_block_tables")
    needed = {
        AttentionType.DECODER: own,
        AttentionType.ENCODER_ONLY: own,
        AttentionType.ENCODER: encoder,
        AttentionType.ENCODER_DECODER: own + (cross if paged else encoder),
    }[attn_type]
    return [name for name in needed if getattr(meta, name) is None]


def require_fields(meta, attn_type: AttentionType, *, paged: bool) -> None:
    if names := missing(meta, attn_type, paged=paged):
        raise InvalidInputError(
            f"{attn_type} attention needs {', '.join(names)} in its attn_metadata, got None"
        )

"""What each type of attention has of a step: whose queries, whose keys, how many and which bias."""

from dataclasses import replace

import torch
from torch import Tensor

from pagedattn import AttentionSpec, attention_bias

from ..attention_type import AttentionType
from . import batches
from .bias_fields import FIELDS as BIAS_FIELDS
from .lengths import on_host, span_lengths


def num_query_tokens(meta, attn_type: AttentionType) -> int:
    if attn_type is AttentionType.ENCODER:
        return meta.num_encoder_tokens or 0
    if meta.slot_mapping is not None:
        return len(meta.slot_mapping)
    return meta.num_prefill_tokens + meta.num_decode_tokens


def seq_lens(meta, attn_type: AttentionType) -> tuple[list[int], list[int]]:
    batches.require_fields(meta, attn_type, paged=False)
    own = span_lengths(meta.query_start_loc), meta.seq_lens
    encoder = span_lengths(meta.encoder_query_start_loc), meta.encoder_seq_lens
    queries, keys = {
        AttentionType.DECODER: own,
        AttentionType.ENCODER_ONLY: own,
        AttentionType.ENCODER: (encoder[0], encoder[0]),
        AttentionType.ENCODER_DECODER: (own[0], encoder[1]),
    }[attn_type]
    encoded = attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_DECODER)
    keys_name = "encoder_seq_lens" if encoded else "seq_lens"
    return on_host("query_start_loc", queries), on_host(keys_name, keys)


def attn_bias(meta, attn_type: AttentionType, spec: AttentionSpec) -> list[Tensor]:
    given = getattr(meta, BIAS_FIELDS[attn_type])
    if given is not None:
        return given
    spec, biases = replace(spec, causal=attn_type.causal), []
    for num_queries, num_keys in zip(*seq_lens(meta, attn_type), strict=True):
        # On a CPU, whatever torch's default device is.
        queries = torch.arange(num_keys - num_queries, num_keys, device="cpu")
        biases.append(attention_bias(queries, torch.arange(num_keys, device="cpu"), spec))
    return biases


def keys(
    meta, attn_type: AttentionType, is_prompt: bool
) -> tuple[Tensor | None, int | None, Tensor | None]:
    if attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_DECODER):
        cross = attn_type is AttentionType.ENCODER_DECODER
        tables = meta.cross_block_tables if cross else None
        return meta.encoder_seq_lens_tensor, meta.max_encoder_seq_len, tables
    longest = meta.max_prefill_seq_len if is_prompt else meta.max_decode_seq_len
    return meta.seq_lens_tensor, longest, meta.block_tables


def num_tokens(meta, attn_type: AttentionType) -> tuple[int, int, int]:
    encoder = meta.num_encoder_tokens or 0
    if attn_type is AttentionType.ENCODER:
        return encoder, encoder, 0
    keys = encoder if attn_type is AttentionType.ENCODER_DECODER else meta.num_prefill_tokens
    return meta.num_prefill_tokens, keys, meta.num_decode_tokens

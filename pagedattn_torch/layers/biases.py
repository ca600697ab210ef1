"""Biases that a step's metadata holds for each sequence, packed as backends take them."""

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor

from pagedattn import AttentionSpec
from pagedattn.checks import require
from pagedattn.facts import known, shown

from .attention_type import AttentionType

FIELDS = {
    AttentionType.DECODER: "attn_bias",
    AttentionType.ENCODER_ONLY: "attn_bias",
    AttentionType.ENCODER: "encoder_attn_bias",
    AttentionType.ENCODER_DECODER: "cross_attn_bias",
}


def under_bias(spec: AttentionSpec) -> AttentionSpec:
    """The formula of a layer whose masks and ALiBi a bias replaces."""
    return dataclasses.replace(spec, causal=False, sliding_window=None, alibi_slopes=None)


def check_lists(meta) -> None:
    """Requires something with an entry for each sequence: a list, or a tensor."""
    for name in sorted({*FIELDS.values()}):
        given = getattr(meta, name)
        several = isinstance(given, list | tuple) or (isinstance(given, Tensor) and given.ndim)
        require(
            given is None or several,
            f"{name} must be a list of tensors, one for each sequence, got {shown(given)}",
        )


def packed_bias(
    meta, kind: AttentionType, query: Tensor
) -> Float[Tensor, "num_tokens heads max_keys"] | None:
    """The bias of a type of attention for the queries of a step; None if there is none.

    Raises:
      InvalidInputError: it is no list of a tensor `[(num_heads,) query_len, key_len]` for each
        sequence.
    """
    biases = getattr(meta, FIELDS[kind])
    if biases is None:
        return None
    biases = [_with_heads(bias, query.shape[1], FIELDS[kind]) for bias in biases]
    _check_lengths(biases, meta, kind)
    heads, max_keys = (max((b.shape[axis] for b in biases), default=1) for axis in (0, 2))
    shape = len(query), heads, max(1, max_keys)
    packed = torch.zeros(shape, dtype=torch.float32, device=query.device)
    start = 0
    for bias in biases:
        _, num_queries, num_keys = bias.shape
        packed[start : start + num_queries, :, :num_keys] = bias.transpose(0, 1)
        start += num_queries
    return packed


def _with_heads(bias, num_heads, name) -> Tensor:
    floating = isinstance(bias, Tensor) and bias.is_floating_point()
    require(
        floating and (bias.ndim == 2 or (bias.ndim == 3 and len(bias) in (1, num_heads))),
        f"{name} must be a list of floating tensors [query_len, key_len] or [{num_heads}, "
        f"query_len, key_len], one for each sequence, got {shown(bias)}",
    )
    return bias if bias.ndim == 3 else bias[None]


def _check_lengths(biases, meta, kind):
    starts, lens = meta.query_start_loc, meta.seq_lens_tensor
    if kind is AttentionType.ENCODER:
        starts = meta.encoder_query_start_loc
        lens = starts.diff()
    elif kind is AttentionType.ENCODER_DECODER:
        lens = meta.encoder_seq_lens_tensor
    queries, keys = known(starts.diff()), known(lens)
    got = [tuple(bias.shape[1:]) for bias in biases]
    require(
        len(got) == len(lens)
        and (queries is None or keys is None or got == [*zip(queries, keys, strict=True)]),
        f"{FIELDS[kind]} must be [query_len, key_len] for each of {len(lens)} sequences, of "
        f"lengths {queries}, {keys}, got {got}",
    )

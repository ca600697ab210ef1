"""Biases that a step's metadata holds for each sequence, packed as backends take them."""

import dataclasses
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pagedattn import AttentionSpec, InvalidInputError, attention_bias
from pagedattn._arrays.inspect import known, shown
from pagedattn._arrays.memory import require_memory
from pagedattn._arrays.namespace import arange
from pagedattn.batch.indices import token_positions
from pagedattn.masks import additive

from ..arrays import require_tensors
from .attention_type import AttentionType
from .metadata.bias_fields import FIELDS
from .metadata.lengths import on_host


def under_bias(spec: AttentionSpec) -> AttentionSpec:
    """The formula of a layer whose masks and ALiBi a bias replaces."""
    return dataclasses.replace(spec, causal=False, sliding_window=None, alibi_slopes=None)


def packed_bias(
    meta, kind: AttentionType, query: Tensor, spec: AttentionSpec
) -> Float[Tensor, "num_tokens heads max_keys"] | None:
    """The bias of a type of attention for the queries of a step; None if there is none.

    Sequences for which none is given have that of the spec.

    Raises:
      InvalidInputError: it is no list with a bias `[(num_heads,) query_len, key_len]` or None for
        each sequence, or for each prefill.
    """
    given = getattr(meta, FIELDS[kind])
    if given is None:
        return None
    starts, lens = _sides(meta, kind)
    lengths = known(starts.diff()), known(lens)
    biases = _of_sequences(given, meta.num_prefills, len(lens), lengths, FIELDS[kind], query.device)
    biases = [_with_heads(bias, query.shape[1], FIELDS[kind]) for bias in biases]
    _check_lengths(biases, len(lens), lengths, FIELDS[kind])
    if biases and all(bias is None for bias in biases):
        return None
    largest = max((bias.shape[2] for bias in biases if bias is not None), default=1)
    packed = torch.zeros(len(query), 1, max(1, largest), dtype=torch.float32, device=query.device)
    if any(bias is None for bias in biases):
        packed = _of_spec(spec, starts, lens, len(query), max(largest, _longest(meta, kind)))
    return _filled(packed, biases, lengths[0], FIELDS[kind])


def _sides(meta, kind) -> tuple[Tensor, Tensor]:
    """Where the queries of each sequence start, and the number of its keys."""
    if kind is AttentionType.ENCODER:
        return meta.encoder_query_start_loc, meta.encoder_query_start_loc.diff()
    if kind is AttentionType.ENCODER_DECODER:
        return meta.query_start_loc, meta.encoder_seq_lens_tensor
    return meta.query_start_loc, meta.seq_lens_tensor


def _of_sequences(given, num_prefills, num_seqs, lengths, name, device) -> list:
    """A tensor or None for each sequence."""
    given = list(given)
    if len(given) == 1 and hasattr(given[0], "q_seqinfo"):
        given = _blocks(given[0], device)
    if len(given) == num_prefills:
        given += [None] * (num_seqs - num_prefills)
    if not any(hasattr(bias, "materialize") for bias in given):
        return given
    sizes = zip(*(on_host(name, values).tolist() for values in lengths), strict=True)
    return [_dense(bias, size, device) for bias, size in zip(given, sizes, strict=False)]


def _dense(bias: Any, size, device):
    """A mask of xFormers as a tensor; anything else as it is."""
    is_mask = hasattr(bias, "materialize")
    return bias.materialize(size, device=device) if is_mask else bias


def _blocks(mask, device) -> list[Tensor]:
    """What xFormers' mask of packed sequences adds, for each of them."""
    sides = mask.q_seqinfo, mask.k_seqinfo
    whole = mask.materialize([side.seqstart_py[-1] for side in sides], device=device)
    spans = zip(*(side.intervals() for side in sides), strict=True)
    return [whole[slice(*queries), slice(*keys)] for queries, keys in spans]


def _with_heads(bias, num_heads, name) -> Tensor | None:
    """A bias as `[1 or num_heads, query_len, key_len]`: float, from a mask that is True where a
    key is seen too, and with any axes in front of the last two taken as one.
    """
    if bias is None:
        return None
    if isinstance(bias, Tensor):
        require_tensors(**{name: bias})
        require_memory(name, bias)
    fits = isinstance(bias, Tensor) and bias.ndim > 1
    fits = fits and (bias.is_floating_point() or bias.dtype is torch.bool)
    bias = bias[None].flatten(0, -3) if fits else bias
    if not (fits and len(bias) in (1, num_heads)):
        raise InvalidInputError(
            f"{name} must be a list of floating or bool tensors [query_len, key_len] or "
            f"[{num_heads}, query_len, key_len], of xFormers' masks, or None, one for each "
            f"sequence or each prefill, got {shown(bias)}"
        )
    return additive(bias) if bias.dtype is torch.bool else bias


def _check_lengths(biases, num_seqs, lengths, name):
    got = [None if bias is None else tuple(bias.shape[1:]) for bias in biases]
    queries, keys = lengths
    expected = got if queries is None or keys is None else [*zip(queries, keys, strict=True)]
    pairs = zip(got, expected, strict=False)
    if not (len(got) == num_seqs and all(one in (None, other) for one, other in pairs)):
        raise InvalidInputError(
            f"{name} must be [query_len, key_len] for each of {num_seqs} sequences, of lengths "
            f"{queries}, {keys}, got {got}"
        )


def _longest(meta, kind) -> int:
    """A bound on the keys of a sequence."""
    bounds = [meta.max_prefill_seq_len, meta.max_decode_seq_len]
    if kind is AttentionType.ENCODER or kind is AttentionType.ENCODER_DECODER:
        bounds = [meta.max_encoder_seq_len]
    return max(1, *(on_host("the bounds on lengths", bound) for bound in bounds))


def _of_spec(spec, starts, lens, num_tokens, num_keys) -> Tensor:
    """What the spec adds for every token: `[num_tokens, heads, num_keys]`."""
    positions = token_positions(starts.int(), lens.int(), num_tokens)
    bias = attention_bias(positions, arange(num_keys, positions), spec)
    return bias[:, None] if bias.ndim == 2 else bias.transpose(0, 1).contiguous()


def _filled(packed: Tensor, biases, query_lens, name) -> Tensor:
    """With the biases that are given in their tokens' rows."""
    heads = max((len(bias) for bias in biases if bias is not None), default=1)
    if packed.shape[1] < heads:
        packed = packed.repeat(1, heads, 1)
    start = 0
    for seq, bias in enumerate(biases):
        if bias is not None:
            rows = packed[start : start + bias.shape[1]]
            rows[:, :, : bias.shape[2]] = bias.transpose(0, 1)
            start += bias.shape[1]
        elif any(other is not None for other in biases[seq:]):
            start += int(on_host(name, query_lens)[seq])
    return packed

"""How a rectangle is computed: tiles of its queries, turns of its keys, and the masks between them.

All of this follows from the batch, so a step prepares it once for its layers.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pagedattn._dispatch.call import Call
from pagedattn.batch.metadata import Sequences
from pagedattn.masks import additive, visible_mask

from ...cache import run_of
from ...uncompiled import require_unrecorded
from ..bias import alibi
from ..gather import fold_bias
from .buckets import Bucket, Span
from .grouping import make_buckets

# Query rows (tokens x heads of a group) of a call. Tiles bound the memory of masks, and early ones
# skip the keys that causality hides.
TILE_ROWS = 768
# Masks that a step on a CPU keeps for its layers. To make one anew costs half an attention.
KEPT_BYTES = 32 << 20


class Tile(NamedTuple):
    """Some queries of each sequence of a rectangle.

    Fields:
      tokens: the token of each; `num_tokens` where a row is padding.
      read: the same, but with some token in place of padding.
      run: the same as a slice; None if it is none.
      live: on a CPU which rows are no padding; None if all are none, or that is unknown.
    """

    tokens: Int[Tensor, "size queries"]
    read: Int[Tensor, "size queries"]
    run: slice | None
    live: Bool[Tensor, "size queries"] | None


class Hidden(NamedTuple):
    """Mask and bias of the queries and keys of a part.

    Fields:
      added: what is added to the logits; None for nothing.
      blind: True for rows that see no key of the part; None if all see all.
    """

    added: Float[Tensor, "size one_or_kv_heads rows keys"] | None
    blind: Bool[Tensor, "size one_or_kv_heads rows"] | None

    def with_bias(self, bias: Float[Tensor, "size one_or_kv_heads rows keys"]) -> "Hidden":
        """The same with a bias, which may hold anything where this hides."""
        if self.added is not None:
            bias = (bias + self.added).masked_fill(self.added == -torch.inf, -torch.inf)
        return Hidden(bias, (bias == -torch.inf).all(3))


class Part(NamedTuple):
    """The keys of a turn that the queries of tile number `tile` see.

    `hidden` makes the mask when a layer asks for it. Small ones are kept for the other layers; all
    those of long queries together would fill memory.
    """

    tile: int
    keys: slice
    hidden: Callable[[], Hidden]
    numbers: Callable[[], Int[Tensor, "size keys"]]  # the keys' positions in their sequences


class Turn(NamedTuple):
    """Keys that are gathered at a time: their blocks, and which slots of these to set to 0."""

    size: int
    blocks: Int[Tensor, "size_times_blocks"]
    # The blocks as a slice, where they follow each other and nothing is set to 0: read in place.
    run: slice | None
    # A mask of slots, or on a CPU their indices.
    absent: Bool[Tensor, "slots"] | Int[Tensor, "num_absent"] | None
    parts: list[Part]


class Rectangle(NamedTuple):
    """One bucket: the tiles of its queries, and all its keys."""

    tiles: list[Tile]
    turns: list[Turn]


def rectangles(call: Call, batch: Sequences, keys_at_once: int) -> list[Rectangle]:
    """The rectangles of a batch; about `keys_at_once` keys are gathered at a time."""
    if call.device == "cpu":
        require_unrecorded()
    left, made = KEPT_BYTES, []
    for bucket in make_buckets(call, batch, keys_at_once):
        num_bytes = _mask_bytes(bucket)
        keeps = bucket.num_queries == 1 or (call.device == "cpu" and num_bytes <= left)
        left -= num_bytes * keeps
        made.append(_rectangle(bucket, keeps))
    return made


def _mask_bytes(bucket: Bucket) -> int:
    heads = bucket.call.num_heads if bucket.call.spec.alibi_slopes else bucket.call.group
    keys = bucket.num_blocks * bucket.call.block_size
    return 4 * bucket.size * heads * bucket.num_queries * keys


def _rectangle(bucket: Bucket, keeps_masks: bool) -> Rectangle:
    step = max(1, TILE_ROWS // bucket.call.group)
    tiles, queries, begin = [], [], 0
    for tokens in bucket.tokens().split(step, dim=1):
        tiles.append(_tile(bucket, tokens))
        end = begin + tokens.shape[1]
        queries.append((begin, end))
        begin = end
    return Rectangle(tiles, [_turn(bucket, span, queries, keeps_masks) for span in bucket.spans()])


def _tile(bucket: Bucket, tokens) -> Tile:
    num_tokens = bucket.call.num_tokens
    live = tokens < num_tokens
    padded = tokens.device.type == "cpu" and not live.all()
    run = None if padded else run_of(tokens)
    return Tile(tokens, tokens.clamp(max=num_tokens - 1), run, live if padded else None)


def _turn(bucket: Bucket, span: Span, queries, keeps_masks: bool) -> Turn:
    parts = []
    for number, (begin, end) in enumerate(queries):
        seen = bucket.seen_by_any(begin, end, span)
        if seen.first < seen.last:  # torch's flash kernel divides by the number of keys
            keys = slice(seen.first - span.first, seen.last - span.first)
            numbers = functools.partial(bucket.numbers, seen)
            hidden = functools.partial(_hidden, bucket, begin, end, seen)
            hidden = functools.cache(hidden) if keeps_masks else hidden
            parts.append(Part(number, keys, hidden, numbers))
    blocks, absent = bucket.blocks(span), _absent(bucket, span)
    return Turn(bucket.size, blocks, run_of(blocks) if absent is None else None, absent, parts)


def _absent(bucket: Bucket, span: Span) -> Bool[Tensor, "slots"] | Int[Tensor, "num_absent"] | None:
    if span.within(bucket.present()):
        return None
    absent = ~bucket.presence(span).flatten()
    return absent.nonzero().flatten() if absent.device.type == "cpu" else absent


def _hidden(bucket: Bucket, begin: int, end: int, seen: Span) -> Hidden:
    visible = None
    if not seen.within(bucket.seen_by_all(begin, end)):
        visible = visible_mask(*bucket.positions(begin, end, seen), bucket.call.spec)
        visible &= bucket.presence(seen)[:, None]
        descent = bucket.descent(begin, end, seen)
        visible = visible if descent is None else visible & descent
    added = _added(bucket, begin, end, seen, visible)
    folded = None if added is None else fold_bias(added, bucket.call)
    if visible is None:
        return Hidden(folded, None)
    blind = ~visible.any(dim=2)
    if bucket.call.device == "cpu":
        require_unrecorded()
        if not blind.any():
            return Hidden(folded, None)
    return Hidden(folded, blind.repeat(1, bucket.call.group)[:, None])


def _added(
    bucket: Bucket,
    begin: int,
    end: int,
    seen: Span,
    visible: Bool[Tensor, "size queries keys"] | None,
) -> Float[Tensor, "_ one_or_heads {end}-{begin} keys"] | None:
    """What is added to the logits; None if nothing is."""
    slopes = bucket.call.spec.alibi_slopes
    if slopes is None:
        return None if visible is None else additive(visible)[:, None]
    bias = alibi(*bucket.positions(begin, end, seen), slopes)
    return bias if visible is None else bias.masked_fill_(~visible[:, None], -torch.inf)

"""Drafts that branch: where keys stand, and which rows descend from them."""

# Constants are NamedTuples here, which the type `constexpr` does not say.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

WORD = tl.constexpr(32)


class Lines(NamedTuple):
    """The lines of descent of a tile's rows, as `DraftTree` has them."""

    context: Any  # keys before those of the new tokens; below 0 if keys are fewer than tokens
    depths: Any  # from the sequence's first new token on
    words: Any  # [rows], each row's first word


@triton.jit
def standing(lines, keys, exists):
    """The positions of keys, or of tokens, counted in slots: where depth counts, not the slot."""
    own = keys - lines.context
    depth = tl.load(lines.depths + own, mask=exists & (own >= 0), other=0)
    return tl.where(own >= 0, lines.context + depth, keys)


@triton.jit
def in_line(keys, lines, WORDS: tl.constexpr):
    """`[rows, keys]`: which keys are of the context, or in a row's own line."""
    KEYS: tl.constexpr = keys.shape[0]
    FEW: tl.constexpr = KEYS // WORD + 1  # words that a step's keys lie in
    MOST: tl.constexpr = FEW if FEW < WORDS else WORDS  # Triton 3.5's `min` is no constant
    own = keys - lines.context
    first = 0
    if MOST < WORDS:
        first = tl.maximum(tl.min(own, 0), 0) // WORD
    at = tl.maximum(own, 0)
    seen = (own < 0)[None, :]
    for i in tl.static_range(MOST):
        word = tl.load(lines.words + first + i, mask=first + i < WORDS, other=0)
        bits = (word[:, None] >> (at % WORD)[None, :]) & 1
        seen = seen | ((at // WORD == first + i)[None, :] & (bits == 1))
    return seen

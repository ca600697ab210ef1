"""Who computes what: the keys of all tokens in a row, cut into parts of equal cost.

A part is a stretch of that row, so it has some whole tokens and, at its ends, pieces of tokens that
it shares with its neighbours: their results are partial, and merged afterwards. Each program finds
its own part, from the lengths on the device: XLA would take several small kernels for it.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .shape import FEWEST, KEYS, OVERHEAD, Shape

AT_ONCE = 8  # sequences whose lengths are loaded together


class Lengths(NamedTuple):
    """As in a batch: `int32` arrays in the device's memory."""

    query_start_loc: Any
    seq_lens: Any


class Token(NamedTuple):
    """A token of the row; the padding is one more sequence, without keys."""

    index: Any
    sequence: Any
    end: Any  # of the sequence's tokens
    keys: Any  # of the sequence
    start: Any  # where it begins in the row


class Part(NamedTuple):
    index: Any
    share: Any  # the cost of every part
    first: Token
    last: Token


class Piece(NamedTuple):
    """Some steps of one token: `steps` of them, an even number, up to key `limit`, backwards."""

    token: Any
    sequence: Any
    limit: Any  # keys from here on are hidden
    last: Any  # the block of keys of step 0; it may lie past the limit
    steps: Any
    slot: Any  # where a partial result goes; -1: the piece is the whole token
    until: Any  # the part that has the token's last keys
    done: Any  # steps of this program before it


def part_of(shape: Shape, index, lengths: Lengths) -> Part:
    """The part of a program."""
    share = share_of(shape, lengths)
    begin = index * share
    ends = begin, begin + share - OVERHEAD - 1
    return Part(index, share, *tokens_at(shape, lengths, ends))


def pieces_of_part(shape: Shape, part: Part, lengths: Lengths, visit, carry):
    """Visits the pieces of a part: `carry = visit(piece, carry)`; returns the last carry."""
    behind = jnp.minimum(part.last.index + 1, shape.num_tokens)

    def tokens_of(sequence, state):
        index, start, done, carry = state
        token = first_of_sequence(shape, lengths, sequence, index, start)

        def visit_one(index, state):
            start, done, carry = state
            now = token._replace(index=index, start=start)
            piece = piece_of(shape, part, now, done)
            return start_of_next(shape, now), done + piece.steps, visit(piece, carry)

        end = jnp.minimum(token.end, behind)
        return end, *lax.fori_loop(index, end, visit_one, (start, done, carry))

    state = part.first.index, part.first.start, jnp.int32(0), carry
    return lax.fori_loop(part.first.sequence, part.last.sequence + 1, tokens_of, state)[-1]


def piece_of(shape: Shape, part: Part, token: Token, done) -> Piece:
    """What a part has of a token."""
    seen = keys_seen(shape, token)
    blocks, place = blocks_of(seen), token.start + OVERHEAD
    begin = jnp.clip(part.index * part.share - place, 0, blocks)
    end = jnp.clip((part.index + 1) * part.share - place, 0, blocks)
    steps = lax.div(end - begin + 1, jnp.int32(2)) * 2
    slot = 2 * part.index + jnp.where(begin > 0, 0, 1)
    slot = jnp.where((begin == 0) & (end == blocks), -1, slot)
    limit, until = jnp.minimum(seen, end * KEYS), lax.div(place + blocks - 1, part.share)
    sequence = jnp.minimum(token.sequence, shape.num_seqs - 1)
    return Piece(token.index, sequence, limit, begin + steps - 1, steps, slot, until, done)


def share_of(shape: Shape, lengths: Lengths):
    """The cost of a part; whole tokens where these are about alike, since merging costs too."""

    def add(token: Token, carry):
        total, longest = carry
        queries = token.end - token.index
        cost = jnp.where(queries > 0, blocks_of(token.keys) + OVERHEAD, 0)
        return total + cost_of(shape, queries, token.keys), jnp.maximum(longest, cost)

    total, longest = each_sequence(shape, lengths, add, (jnp.int32(0), jnp.int32(1)))
    share = jnp.maximum(cdiv(total, shape.parts), OVERHEAD + FEWEST)
    whole = cdiv(share, longest) * longest
    return jnp.where(10 * whole <= 11 * share, whole, share)


def tokens_at(shape: Shape, lengths: Lengths, places) -> list[Token]:
    """The tokens that places of the row belong to."""

    def skip(token: Token, state):
        start, found = state
        after = start + cost_of(shape, token.end - token.index, token.keys)
        next_one = token.sequence + 1, token.end, after
        return after, [
            [jnp.where(after <= place, new, old) for new, old in zip(next_one, known, strict=True)]
            for place, known in zip(places, found, strict=True)
        ]

    zero = jnp.int32(0)
    _, found = each_sequence(shape, lengths, skip, (zero, [[zero] * 3 for _ in places]))
    firsts = [first_of_sequence(shape, lengths, *known) for known in found]
    return [skip_tokens(shape, first, place) for first, place in zip(firsts, places, strict=True)]


def skip_tokens(shape: Shape, token: Token, place) -> Token:
    """The token of the same sequence that a place belongs to."""

    def skip(_, token: Token):
        after = start_of_next(shape, token)
        behind = after <= place
        start = jnp.where(behind, after, token.start)
        return token._replace(index=jnp.where(behind, token.index + 1, token.index), start=start)

    return lax.fori_loop(token.index, token.end, skip, token)


def each_sequence(shape: Shape, lengths: Lengths, visit, carry):
    """Visits the first token of each sequence, its start unknown, and of the padding."""

    def some(i, state):
        index, carry = state
        for k in range(AT_ONCE):
            token = first_of_sequence(shape, lengths, i * AT_ONCE + k, index, jnp.int32(0))
            index, carry = token.end, visit(token, carry)
        return index, carry

    times = -(-(shape.num_seqs + 1) // AT_ONCE)
    return lax.fori_loop(jnp.int32(0), jnp.int32(times), some, (jnp.int32(0), carry))[1]


def first_of_sequence(shape: Shape, lengths: Lengths, sequence, index, start) -> Token:
    """The first token of a sequence, given the end of the tokens before."""
    real = sequence < shape.num_seqs
    end = lengths.query_start_loc[jnp.minimum(sequence + 1, shape.num_seqs)]
    keys = lengths.seq_lens[jnp.minimum(sequence, shape.num_seqs - 1)]
    end = jnp.where(real, jnp.clip(end, index, shape.num_tokens), shape.num_tokens)
    keys = jnp.where(real, jnp.clip(keys, 0, shape.max_blocks * shape.block_size), 0)
    return Token(index, sequence, end, keys, start)


def start_of_next(shape: Shape, token: Token):
    return token.start + OVERHEAD + blocks_of(keys_seen(shape, token))


def keys_seen(shape: Shape, token: Token):
    if not shape.spec.causal:
        return token.keys
    return jnp.maximum(token.keys - (token.end - 1 - token.index), 0)


def cost_of(shape: Shape, queries, keys):
    """Of all tokens of a sequence."""
    overhead = queries * OVERHEAD
    if not shape.spec.causal:
        return queries * blocks_of(keys) + overhead
    blocks = blocks_up_to(keys) - blocks_up_to(jnp.maximum(keys - queries, 0))
    return blocks + jnp.maximum(queries - keys, 0) + overhead


def blocks_of(keys):
    """A token without keys has a block too, for its results."""
    return jnp.maximum(cdiv(keys, KEYS), 1)


def blocks_up_to(keys):
    """The blocks of tokens that see 1, 2, ... `keys` keys, together."""
    full = lax.div(keys, jnp.int32(KEYS))
    return (full + 1) * (full * (KEYS // 2) + lax.rem(keys, jnp.int32(KEYS)))


def cdiv(a, b):
    """Of numbers that are not negative, in a kernel."""
    return lax.div(a + (b - 1), jnp.int32(b))

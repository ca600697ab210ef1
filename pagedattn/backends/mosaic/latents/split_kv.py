"""Who computes what: the keys of all tokens in a row, cut into parts of equal cost.

A part is a stretch of that row, so it has some whole tokens and, at its ends, pieces of tokens that
it shares with its neighbours: their results are partial, and merged afterwards. All is found on the
device, from lengths on the device.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ...._arrays.namespace import cdiv
from .kernel_config import FEWEST, KEYS, OVERHEAD, Shape


class Work(NamedTuple):
    """As `int32` arrays in the device's memory."""

    tokens: Any  # [num_tokens, 3]: sequence, keys that it sees, where it begins in the row
    parts: Any  # [parts, 4]: where it begins and ends in the row, first token, number of tokens


class Piece(NamedTuple):
    """Some steps of one token: `steps` of them, an even number, up to key `limit`, backwards."""

    token: Any
    sequence: Any
    limit: Any  # keys from here on are hidden
    last: Any  # the block of keys of step 0; it may lie past the limit
    steps: Any
    slot: Any  # where a partial result goes; -1: the piece is the whole token
    done: Any  # steps of this program before it


def work_of(shape: Shape, query_start_loc, seq_lens) -> Work:
    """The whole work, cut into parts."""
    sequence, key_len = keys_of_tokens(shape, query_start_loc, seq_lens)
    cost = jnp.maximum(cdiv(key_len, KEYS), 1) + OVERHEAD
    ends, longest = running(cost)
    starts = ends - cost
    share = share_of(shape, longest, ends[-1])
    begins = jnp.arange(shape.parts, dtype=jnp.int32) * share
    first = count(ends[None, :] <= begins[:, None])
    behind = count(starts[None, :] + OVERHEAD < begins[:, None] + share)
    tokens = jnp.stack([sequence, key_len, starts], axis=1).astype(jnp.int32)
    parts = jnp.stack([begins, begins + share, first, behind - first], axis=1)
    return Work(tokens, parts.astype(jnp.int32))


def running(cost):
    """Sums up to each token, and the largest of all, by one kernel of XLA."""
    token = jnp.arange(len(cost))
    upto = jnp.where(token <= token[:, None], cost, 0)
    zero = jnp.int32(0)

    def join(a, b):
        return a[0] + b[0], jnp.maximum(a[1], b[1])

    ends, longest = lax.reduce((upto, jnp.broadcast_to(cost, upto.shape)), (zero, zero), join, [1])
    return ends, longest[0]


def count(flags):
    return jnp.sum(flags, axis=1, dtype=jnp.int32)


def keys_of_tokens(shape: Shape, query_start_loc, seq_lens):
    """The sequence of each token and the keys that it sees; padding tokens see none."""
    starts = jnp.clip(query_start_loc, 0, shape.num_tokens).astype(jnp.int32)
    token = jnp.arange(shape.num_tokens, dtype=jnp.int32)
    behind = count(token[:, None] >= starts[None, 1:])
    sequence = jnp.minimum(behind, shape.num_seqs - 1)
    key_len = jnp.clip(seq_lens, 0, shape.max_blocks * shape.block_size).astype(jnp.int32)
    seen = key_len[sequence]
    if shape.spec.causal:
        seen = seen - (starts[sequence + 1] - 1 - token)
    live = (behind < shape.num_seqs) & (token >= starts[0])
    return sequence, jnp.where(live, jnp.clip(seen, 0, key_len[sequence]), 0)


def share_of(shape: Shape, longest, total):
    """The cost of a part; whole tokens where these are about alike, since merging costs too."""
    share = jnp.maximum(cdiv(total, shape.parts), OVERHEAD + FEWEST)
    whole = cdiv(share, longest) * longest
    return jnp.where(10 * whole <= 11 * share, whole, share).astype(jnp.int32)


def pieces_of_part(shape: Shape, part, work: Work, visit, carry):
    """Visits the pieces of a part, in a kernel: `visit(piece, index, carry)`."""

    def visit_one(index, carry):
        done, carry = carry
        piece = piece_at(part, index, work, done)
        return done + piece.steps, visit(piece, index, carry)

    lax.fori_loop(jnp.int32(0), work.parts[part, 3], visit_one, (jnp.int32(0), carry))


def piece_at(part, index, work: Work, done) -> Piece:
    """The piece of a part at an index, after so many steps of the same program."""
    begin, end, first = (work.parts[part, i] for i in range(3))
    token = jnp.clip(first + index, 0, work.tokens.shape[0] - 1)
    sequence, key_len, start = (work.tokens[token, i] for i in range(3))
    return piece_of(part, token, sequence, key_len, begin - start, end - start, done)


def last_part_of(work: Work, token):
    """The part that has the last keys of a token."""
    share = work.parts[0, 1] - work.parts[0, 0]
    key_len, start = work.tokens[token, 1], work.tokens[token, 2]
    blocks = jnp.maximum(lax.div(key_len + (KEYS - 1), jnp.int32(KEYS)), 1)
    return lax.div(start + OVERHEAD + blocks - 1, share)


def piece_of(part, token, sequence, key_len, begin, end, done) -> Piece:
    """The piece of a token that lies between two places, counted from the token's own."""
    blocks = jnp.maximum(lax.div(key_len + (KEYS - 1), jnp.int32(KEYS)), 1)
    begin = jnp.clip(begin - OVERHEAD, 0, blocks)
    end = jnp.clip(end - OVERHEAD, 0, blocks)
    steps = lax.div(end - begin + 1, jnp.int32(2)) * 2
    slot = 2 * part + jnp.where(begin > 0, 0, 1)
    slot = jnp.where((begin == 0) & (end == blocks), -1, slot)
    limit = jnp.minimum(key_len, end * KEYS)
    return Piece(token, sequence, limit, begin + steps - 1, steps, slot, done)

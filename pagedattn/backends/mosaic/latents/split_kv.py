"""Who computes what: the keys of all tokens in a row, cut into parts of equal cost.

A part is a stretch of that row, so it has some whole tokens and, at its ends, stretches of tokens
that it shares with its neighbours: their results are partial, and merged afterwards. All is found
on the device, from lengths on the device.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ...._arrays.namespace import cdiv
from .kernel_config import FEWEST, KEYS, OVERHEAD, KernelConfig


class Schedule(NamedTuple):
    """As `int32` arrays in the device's memory."""

    tokens: Any  # [num_tokens, 3]: sequence, keys that it sees, where it begins in the row
    parts: Any  # [parts, 4]: where it begins and ends in the row, first token, number of tokens


class WorkItem(NamedTuple):
    """Some steps of one token: `steps` of them, an even number, up to key `limit`, backwards."""

    token: Any
    sequence: Any
    limit: Any  # keys from here on are hidden
    last: Any  # the block of keys of step 0; it may lie past the limit
    steps: Any
    slot: Any  # where a partial result goes; -1: the work item is the whole token
    done: Any  # steps of this program before it


def schedule_of(config: KernelConfig, query_start_loc, seq_lens) -> Schedule:
    """The schedule: the parts, and where tokens lie in the row."""
    sequence, key_len = keys_of_tokens(config, query_start_loc, seq_lens)
    cost = jnp.maximum(cdiv(key_len, KEYS), 1) + OVERHEAD
    ends, longest = running(cost)
    starts = ends - cost
    share = share_of(config, longest, ends[-1])
    begins = jnp.arange(config.parts, dtype=jnp.int32) * share
    first = count(ends[None, :] <= begins[:, None])
    behind = count(starts[None, :] + OVERHEAD < begins[:, None] + share)
    tokens = jnp.stack([sequence, key_len, starts], axis=1).astype(jnp.int32)
    parts = jnp.stack([begins, begins + share, first, behind - first], axis=1)
    return Schedule(tokens, parts.astype(jnp.int32))


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


def keys_of_tokens(config: KernelConfig, query_start_loc, seq_lens):
    """The sequence of each token and the keys that it sees; padding tokens see none."""
    starts = jnp.clip(query_start_loc, 0, config.num_tokens).astype(jnp.int32)
    token = jnp.arange(config.num_tokens, dtype=jnp.int32)
    behind = count(token[:, None] >= starts[None, 1:])
    sequence = jnp.minimum(behind, config.num_seqs - 1)
    key_len = jnp.clip(seq_lens, 0, config.max_blocks * config.block_size).astype(jnp.int32)
    seen = key_len[sequence]
    if config.spec.causal:
        seen = seen - (starts[sequence + 1] - 1 - token)
    live = (behind < config.num_seqs) & (token >= starts[0])
    return sequence, jnp.where(live, jnp.clip(seen, 0, key_len[sequence]), 0)


def share_of(config: KernelConfig, longest, total):
    """The cost of a part; whole tokens where these are about alike, since merging costs too."""
    share = jnp.maximum(cdiv(total, config.parts), OVERHEAD + FEWEST)
    whole = cdiv(share, longest) * longest
    return jnp.where(10 * whole <= 11 * share, whole, share).astype(jnp.int32)


def items_of_part(config: KernelConfig, part, schedule: Schedule, visit, carry):
    """Visits the work items of a part, in a kernel: `visit(work_item, index, carry)`."""

    def visit_one(index, carry):
        done, carry = carry
        work_item = item_at(part, index, schedule, done)
        return done + work_item.steps, visit(work_item, index, carry)

    lax.fori_loop(jnp.int32(0), schedule.parts[part, 3], visit_one, (jnp.int32(0), carry))


def item_at(part, index, schedule: Schedule, done) -> WorkItem:
    """The work item of a part at an index, after so many steps of the same program."""
    begin, end, first = (schedule.parts[part, i] for i in range(3))
    token = jnp.clip(first + index, 0, schedule.tokens.shape[0] - 1)
    sequence, key_len, start = (schedule.tokens[token, i] for i in range(3))
    return item_of(part, token, sequence, key_len, begin - start, end - start, done)


def last_part_of(schedule: Schedule, token):
    """The part that has the last keys of a token."""
    share = schedule.parts[0, 1] - schedule.parts[0, 0]
    key_len, start = schedule.tokens[token, 1], schedule.tokens[token, 2]
    blocks = jnp.maximum(lax.div(key_len + (KEYS - 1), jnp.int32(KEYS)), 1)
    return lax.div(start + OVERHEAD + blocks - 1, share)


def item_of(part, token, sequence, key_len, begin, end, done) -> WorkItem:
    """The work item of a token that lies between two places, counted from the token's own."""
    blocks = jnp.maximum(lax.div(key_len + (KEYS - 1), jnp.int32(KEYS)), 1)
    begin = jnp.clip(begin - OVERHEAD, 0, blocks)
    end = jnp.clip(end - OVERHEAD, 0, blocks)
    steps = lax.div(end - begin + 1, jnp.int32(2)) * 2
    slot = 2 * part + jnp.where(begin > 0, 0, 1)
    slot = jnp.where((begin == 0) & (end == blocks), -1, slot)
    limit = jnp.minimum(key_len, end * KEYS)
    return WorkItem(token, sequence, limit, begin + steps - 1, steps, slot, done)

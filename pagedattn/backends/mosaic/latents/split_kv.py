"""Who computes what: the keys of all tokens in a row, cut into parts of equal cost.

A part is a stretch of that row, so it has some whole tokens and, at its ends, stretches of tokens
that it shares with its neighbours: these leave their sums to the part in which the token begins.
All is found on the device, from lengths on the device.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...._arrays.namespace import cdiv
from .kernel_config import FEWEST, KEYS, KernelConfig

LEAST = -(2**16)  # below any number of a schedule


class Schedule(NamedTuple):
    """As `int32` arrays in the device's memory."""

    tokens: Any  # [num_tokens, 3]: sequence, keys that it sees, where it begins in the row
    # [parts, 7]: where it begins and ends in the row, first token, number of tokens; and what
    # `tokens` has of the first one, as a second load would delay all that a program does.
    parts: Any


class WorkItem(NamedTuple):
    """Some steps of one token: `steps` of them, up to key `limit`, backwards."""

    token: Any
    sequence: Any
    limit: Any  # keys from here on are hidden
    last: Any  # the block of keys of step 0; it may lie past the limit
    steps: Any
    done: Any  # steps of this program before it
    part: Any
    first_part: Any  # in which the token begins
    last_part: Any

    def visible_keys(self, step):
        """Keys of a step that are seen, its first ones: none if <= 0, all if >= KEYS."""
        return self.limit - (self.last - step) * KEYS


def schedule_of(config: KernelConfig, query_start_loc, seq_lens) -> Schedule:
    """The schedule: the parts, and where tokens lie in the row."""
    sequence, key_len = keys_of_tokens(config, query_start_loc, seq_lens)
    cost = jnp.maximum(cdiv(key_len, KEYS), 1) + config.overhead
    starts, ends, share = cut(config, cost)
    begins = jnp.arange(config.parts, dtype=jnp.int32) * share
    first = count(ends[None, :] <= begins[:, None])
    behind = count(starts[None, :] + config.overhead < begins[:, None] + share)
    tokens = jnp.stack([sequence, key_len, starts], axis=1).astype(jnp.int32)
    parts = jnp.stack([begins, begins + share, first, behind - first], axis=1).astype(jnp.int32)
    first_tokens = tokens[jnp.minimum(first, config.num_tokens - 1)]
    return Schedule(tokens, jnp.concatenate([parts, first_tokens], axis=1))


def cut(config: KernelConfig, cost):
    """Where tokens begin and end in the row, and the cost of a part.

    Where tokens are about alike, parts have whole tokens, or tokens whole parts: a work item more
    costs as much as some steps. Whole parts of a token have equal steps: all have one work item. Of
    two, if steps do not come in pairs, the second has fewer, so that its sums are there when the
    first, which joins them, is done.
    """
    ends, longest = running(cost)
    share = jnp.maximum(cdiv(ends[-1], config.parts), config.overhead + FEWEST)
    whole = cdiv(share, longest) * longest
    pieces = jnp.maximum(lax.div(longest * config.parts, ends[-1]), 1)
    steps = jnp.maximum(cdiv(ends[-1] - len(cost) * config.overhead, config.parts), FEWEST)
    more = (pieces == 2) if config.steps_at_once == 1 else 0
    equal = jnp.maximum(cdiv(longest - config.overhead, pieces) + more, steps)
    parts = cdiv(cost - config.overhead, equal)
    parts_ends, _ = running(parts)
    by_parts = alike(equal, share) & (parts_ends[-1] <= config.parts)
    cost, ends = (jnp.where(by_parts, equal * n, m) for n, m in ((parts, cost), (parts_ends, ends)))
    share = jnp.where(by_parts, equal, jnp.where(alike(whole, share), whole, share))
    return ends - cost - jnp.where(by_parts, config.overhead, 0), ends, share.astype(jnp.int32)


def alike(rounded, share):
    return 10 * rounded <= 11 * share


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


class WorkItems(NamedTuple):
    """The work items of a part, in a kernel."""

    config: KernelConfig
    part: Any
    schedule: Schedule

    def __call__(self, visit, carry):
        """Calls `visit(work_item, index, carry)` for each.

        What `carry` has is loaded before the first one; no number of it is negative.
        """
        begin, end, first, number, *fields = (self.schedule.parts[self.part, i] for i in range(7))
        number = loaded_together(number, (begin, end, first, *fields, *jax.tree.leaves(carry)))

        def visit_one(index, carry):
            done, fields, carry = carry
            following = functools.partial(token_fields, self.schedule, first + index + 1)
            ends = begin, end
            work_item = item_of(self.config, self.part, first + index, fields, ends, done)
            ahead = lax.cond(index + 1 < number, following, lambda: fields)
            return done + work_item.steps, ahead, visit(work_item, index, carry)

        lax.fori_loop(jnp.int32(0), number, visit_one, (jnp.int32(0), fields, carry))


def own_items(config: KernelConfig, arrays) -> WorkItems:
    """The work items of a program.

    The last part is that of the first programs: a part waits for those behind it, so that programs
    wait for none that start after them. (GPUs start blocks in the order of their numbers, although
    CUDA does not promise it.)
    """
    part = config.parts - 1 - lax.axis_index("part")
    return WorkItems(config, part, Schedule(arrays.tokens, arrays.parts))


def loaded_together(number, others):
    """The number, unchanged, by an expression that needs the others from memory, too.

    The GPU's assembler would load them once the number says that they are needed: half a
    microsecond later. A barrier for XLA or LLVM does not keep it from that.
    """
    least = functools.reduce(jnp.minimum, others)
    return jnp.where(least < LEAST, 0, number)


def token_fields(schedule: Schedule, token):
    return [schedule.tokens[token, i] for i in range(3)]


def item_of(config: KernelConfig, part, token, fields, ends, done) -> WorkItem:
    """What of a token lies between the ends of a part, after so many steps of the same program."""
    sequence, key_len, start = fields
    blocks = jnp.maximum(lax.div(key_len + (KEYS - 1), jnp.int32(KEYS)), 1)
    first = start + config.overhead
    begin, end = (jnp.clip(place - first, 0, blocks) for place in ends)
    at_once = config.steps_at_once
    steps = lax.div(end - begin + (at_once - 1), jnp.int32(at_once)) * at_once
    limit = jnp.minimum(key_len, end * KEYS)
    parts = (lax.div(block, ends[1] - ends[0]) for block in (first, first + blocks - 1))
    return WorkItem(token, sequence, limit, begin + steps - 1, steps, done, part, *parts)

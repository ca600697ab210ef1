"""Sequences of a batch grouped by length, so that a kernel for rectangles wastes little padding."""

import functools
from typing import NamedTuple

from pagedattn._arrays.namespace import cdiv
from pagedattn._dispatch.call import Call
from pagedattn.batch.metadata import Sequences
from pagedattn.masks import key_range

from .buckets import Bounds, Bucket, Rows

# On a CPU one more call costs about as much as padding a sequence by so many keys.
KEYS_A_CALL = 128
# A group of decodes may be gathered in turns, but each turn gives a sequence at least so many keys:
# the results of every turn have to be joined.
KEYS_A_TURN = 256


class Group(NamedTuple):
    """Sequences that are computed together, padded to the first one, which has the most keys.

    Fields:
      queries: their number of queries, padded (`_padded`).
      blocks: the blocks of the first one.
      least_blocks: the fewest that another may have.
      most_seqs: how many sequences there may be.
      seqs: these sequences.
    """

    queries: int
    blocks: int
    least_blocks: int
    most_seqs: int
    seqs: list[int]


def make_buckets(call: Call, batch: Sequences, keys_at_once: int) -> list[Bucket]:
    """Groups sequences of like lengths, to gather about `keys_at_once` keys of a group at a time.

    On a GPU all sequences form one group, padded to the static bounds: reading their lengths would
    wait for it.
    """
    rows = _rows(call, batch)
    if call.device != "cpu":
        blocks = call.visible_blocks
        return [Bucket(call, rows, call.longest_query, blocks, blocks, None)]
    groups = _groups(rows, call.block_size, keys_at_once)
    order, buckets, first = [], [], 0
    for group in groups:
        order += group.seqs
    rows = rows.of(order)
    for group in groups:
        members = rows.between(first, first + len(group.seqs))
        buckets.append(_bucket(call, members, group.blocks, keys_at_once))
        first += len(group.seqs)
    return buckets


def _rows(call, batch) -> Rows:
    query_lens = batch.query_lens
    contexts = batch.seq_lens - query_lens
    seen, _ = key_range(contexts, contexts, batch.seq_lens, False, call.window)
    first = seen // call.block_size
    first_keys = first * call.block_size
    # Inside jit nobody has checked the lengths: clamped, they lead past no table and no token.
    num_keys = batch.seq_lens.clamp(0, call.capacity) - first_keys
    query_lens = query_lens.clamp(0, call.longest_query)
    starts = batch.query_start_loc[:-1]
    contexts = contexts - first_keys
    return Rows(batch.block_tables, first, starts, query_lens, contexts, num_keys, batch.tree)


def _groups(rows, block_size, keys_at_once) -> list[Group]:
    """Groups of the sequences that have queries and keys; equal ones stay in their order."""
    lengths = zip(rows.query_lens.tolist(), rows.num_keys.tolist(), strict=True)
    sizes = [  # negative, so that the most queries, and of these the most blocks, come first
        (-_padded(queries), -keys // block_size, seq)
        for seq, (queries, keys) in enumerate(lengths)
        if queries > 0 and keys > 0
    ]
    groups: list[Group] = []
    group = None
    for queries, blocks, seq in sorted(sizes):
        if (
            group is None
            or group.queries != -queries
            or group.least_blocks > -blocks
            or group.most_seqs <= len(group.seqs)
        ):
            group = _group(-queries, -blocks, block_size, keys_at_once)
            groups.append(group)
        group.seqs.append(seq)
    return groups


@functools.lru_cache(1024)
def _padded(queries: int) -> int:
    """The number of queries, padded: sequences with the same number may be computed together.

    A single query is not padded, so that decodes stay among themselves. More are rounded up to a
    multiple of 16, since 16 rows cost no more than one, or of an eighth of the next power of two.
    """
    step = max(16, 1 << queries.bit_length() >> 4)
    return queries if queries <= 1 else cdiv(queries, step) * step


def _group(queries: int, blocks: int, block_size: int, keys_at_once: int) -> Group:
    keys = blocks * block_size
    padding = max(KEYS_A_CALL, keys // 8)
    turn = min(keys, KEYS_A_TURN) if queries == 1 else keys
    return Group(queries, blocks, blocks - padding // block_size, keys_at_once // turn, [])


def _bucket(call, rows, num_blocks, keys_at_once) -> Bucket:
    query_lens, contexts = rows.query_lens.tolist(), rows.contexts.tolist()
    num_keys, num_queries = rows.num_keys.tolist(), max(query_lens)
    # More keys at once for long queries: their results of every turn are kept until the last one.
    at_once = max(1, keys_at_once // call.block_size // len(contexts))
    at_once *= max(1, num_queries // 16)
    bounds = Bounds(min(contexts), max(contexts), min(num_keys))
    return Bucket(call, rows, num_queries, num_blocks, min(num_blocks, at_once), bounds)

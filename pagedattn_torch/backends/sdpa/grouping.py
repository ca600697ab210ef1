"""Sequences of a batch grouped by length, so that a kernel for rectangles wastes little padding."""

import torch

from pagedattn._arrays.namespace import cdiv
from pagedattn._dispatch.call import Call
from pagedattn.batch.metadata import Sequences

from ..gather import first_blocks
from .buckets import Bounds, Bucket, Rows

# On a CPU one more call costs about as much as padding a sequence by so many keys.
KEYS_A_CALL = 128
# A group of decodes may be gathered in turns, but each turn gives a sequence at least so many keys:
# the results of every turn have to be joined.
KEYS_A_TURN = 256


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
    order = [seq for group in groups for *_, seq in group]
    rows = rows.take(torch.tensor(order, dtype=torch.long, device="cpu"))
    buckets, first = [], 0
    for group in groups:
        members = rows.take(slice(first, first + len(group)))
        buckets.append(_bucket(call, members, group[0][1], keys_at_once))
        first += len(group)
    return buckets


def _rows(call, batch) -> Rows:
    first = first_blocks(call, batch)
    first_keys = first * call.block_size
    # Inside jit nobody has checked the lengths: clamped, they lead past no table and no token.
    num_keys = batch.seq_lens.clamp(0, call.capacity) - first_keys
    query_lens = batch.query_lens.clamp(0, call.longest_query)
    starts, contexts = batch.query_start_loc[:-1], batch.context_lens - first_keys
    return Rows(batch.block_tables, first, starts, query_lens, contexts, num_keys)


def _groups(rows, block_size, keys_at_once) -> list[list[tuple[int, int, int]]]:
    """Groups of (query class, number of blocks, index) of sequences that have queries and keys.

    In each group the first sequence has the most blocks; equal ones stay in their order.
    """
    lengths = zip(rows.query_lens.tolist(), rows.num_keys.tolist(), strict=True)
    sizes = [
        (_query_class(queries), cdiv(keys, block_size), seq)
        for seq, (queries, keys) in enumerate(lengths)
        if queries > 0 and keys > 0
    ]
    groups: list[list] = []
    for size in sorted(sizes, key=lambda size: (-size[0], -size[1])):
        if not groups or not _joins(size, groups[-1], block_size, keys_at_once):
            groups.append([])
        groups[-1].append(size)
    return groups


def _query_class(queries: int) -> int:
    """The number of queries, padded: sequences with the same number may be computed together.

    A single query is not padded, so that decodes stay among themselves. More are rounded up to a
    multiple of 16, since 16 rows cost no more than one, or of an eighth of the next power of two.
    """
    step = max(16, 1 << queries.bit_length() >> 4)
    return queries if queries <= 1 else cdiv(queries, step) * step


def _joins(size, group, block_size, keys_at_once) -> bool:
    """Whether to add a sequence to a group, padded to its first one, which has the most keys."""
    queries, blocks, _ = group[0]
    keys, padding = blocks * block_size, (blocks - size[1]) * block_size
    turn = min(keys, KEYS_A_TURN) if queries == 1 else keys
    return (
        size[0] == queries
        and padding <= max(KEYS_A_CALL, keys // 8)
        and (len(group) + 1) * turn <= keys_at_once
    )


def _bucket(call, rows, num_blocks, keys_at_once) -> Bucket:
    query_lens, contexts, num_keys = (
        part.tolist() for part in (rows.query_lens, rows.contexts, rows.num_keys)
    )
    # More keys at once for long queries: their results of every turn are kept until the last one.
    at_once = max(1, keys_at_once // call.block_size // len(contexts))
    at_once *= max(1, max(query_lens) // 16)
    bounds = Bounds(min(contexts), max(contexts), min(num_keys))
    return Bucket(call, rows, max(query_lens), num_blocks, min(num_blocks, at_once), bounds)

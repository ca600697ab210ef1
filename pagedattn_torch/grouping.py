"""Sequences of a batch grouped by length, so that a kernel for rectangles wastes little padding."""

import torch

from pagedattn import AttentionSpec, BatchMetadata

from .buckets import Bounds, Bucket, Rows, first_blocks

# A call of its own costs a CPU about as much as this many keys more.
KEYS_A_CALL = 128
# Taking turns, sequences get at least so many keys a turn: every turn's results are to be joined.
KEYS_A_TURN = 256


def make_buckets(batch: BatchMetadata, spec: AttentionSpec, keys_at_once: int) -> list[Bucket]:
    """Groups sequences of like lengths, to gather about `keys_at_once` keys of a group at a time.

    Off the CPU there is one group of the static bounds: reading lengths would wait for the device.
    """
    rows = _rows(batch, spec)
    if batch.seq_lens.device.type != "cpu":
        sizes = batch.max_query_len, batch.max_blocks, batch.max_blocks
        return [Bucket(rows, spec, batch.block_size, *sizes, None)]
    groups = _groups(rows, batch.block_size, keys_at_once)
    rows = rows.take(torch.tensor([seq for group in groups for *_, seq in group], dtype=torch.long))
    buckets, first = [], 0
    for group in groups:
        members = rows.take(slice(first, first + len(group)))
        buckets.append(_bucket(members, spec, batch.block_size, group[0][1], keys_at_once))
        first += len(group)
    return buckets


def _rows(batch, spec) -> Rows:
    first = first_blocks(batch, spec)
    first_keys = first * batch.block_size
    # Inside jit lengths are whatever they are; they must not lead past the table or the tokens.
    num_keys = batch.seq_lens.clamp(0, batch.max_blocks * batch.block_size) - first_keys
    query_lens = batch.query_lens.clamp(0, min(batch.max_query_len, batch.num_tokens))
    starts, contexts = batch.query_start_loc[:-1], batch.context_lens - first_keys
    return Rows(batch.block_tables, first, starts, query_lens, contexts, num_keys)


def _groups(rows, block_size, keys_at_once) -> list[list[tuple[int, int, int]]]:
    """Query class, number of blocks and index of each sequence that has something to compute."""
    lengths = zip(rows.query_lens.tolist(), rows.num_keys.tolist(), strict=True)
    sizes = [
        (_query_class(queries), -(-keys // block_size), seq)
        for seq, (queries, keys) in enumerate(lengths)
        if queries > 0 and keys > 0
    ]
    groups: list[list] = []
    for size in sorted(sizes, reverse=True):
        if not groups or not _joins(size, groups[-1], block_size, keys_at_once):
            groups.append([])
        groups[-1].append(size)
    return groups


def _query_class(queries: int) -> int:
    """Decoding apart; else up to an eighth of the power of two, or the 16 rows that cost as one."""
    step = max(16, 1 << queries.bit_length() >> 4)
    return queries if queries <= 1 else -(-queries // step) * step


def _joins(size, group, block_size, keys_at_once) -> bool:
    """Whether to pad a sequence to the size of a group's first, which has the most keys."""
    queries, blocks, _ = group[0]
    keys, padding = blocks * block_size, (blocks - size[1]) * block_size
    turn = min(keys, KEYS_A_TURN) if queries == 1 else keys
    return (
        size[0] == queries
        and padding <= max(KEYS_A_CALL, keys // 8)
        and (len(group) + 1) * turn <= keys_at_once
    )


def _bucket(rows, spec, block_size, num_blocks, keys_at_once) -> Bucket:
    query_lens, contexts, num_keys = (
        part.tolist() for part in (rows.query_lens, rows.contexts, rows.num_keys)
    )
    # Long queries get more at once: the results of each turn are kept until the last.
    at_once = max(1, keys_at_once // block_size // len(contexts)) * max(1, max(query_lens) // 16)
    bounds = Bounds(min(contexts), max(contexts), min(num_keys))
    sizes = max(query_lens), num_blocks, min(num_blocks, at_once)
    return Bucket(rows, spec, block_size, *sizes, bounds)

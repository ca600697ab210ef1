"""Tiles cut into parts of about equal work over the whole batch, whatever its sequences' lengths.

All tiles of a sequence are cut alike, into parts in proportion to its keys. Every program computes
from the lengths, on the device, which part is its own.
"""

import triton
import triton.language as tl

CHUNK = tl.constexpr(128)  # sequences looked at together


@triton.jit
def sequence_of(
    seq, query_start_loc, seq_lens, window, num_tokens, num_seqs, max_blocks,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Of one sequence or many: where its queries start, their number, its length, the first key
    that is seen, the steps of a tile, and the tiles; values that break the contract are clamped.
    """
    exists = seq < num_seqs
    start = tl.load(query_start_loc + seq, mask=exists, other=0)
    stop = tl.load(query_start_loc + seq + 1, mask=exists, other=0)
    seq_len = tl.load(seq_lens + seq, mask=exists, other=0)
    start = tl.minimum(tl.maximum(start, 0), num_tokens)
    query_len = tl.minimum(tl.maximum(stop, 0), num_tokens) - start
    seq_len = tl.minimum(tl.maximum(seq_len, 0), max_blocks * BLOCK_SIZE)
    first_key = seq_len * 0
    if WINDOW:
        first_key = tl.maximum(seq_len - query_len - window + 1, 0) // KEYS * KEYS
    # A tile without keys has a step too, in which its rows are stored.
    steps = tl.maximum((seq_len - first_key + KEYS - 1) // KEYS, 1)
    tiles = tl.maximum(query_len + TOKENS - 1, 0) // TOKENS
    return start, query_len, seq_len, first_key, steps, tiles


@triton.jit
def parts_of(steps, total, wanted, MIN_STEPS: tl.constexpr, MAX_PARTS: tl.constexpr):
    """The parts of a tile: all tiles, of `total` steps, get no more than `wanted` or one each."""
    parts = (steps.to(tl.int64) * wanted // tl.maximum(total, 1)).to(tl.int32)
    return tl.maximum(tl.minimum(tl.minimum(parts, steps // MIN_STEPS), MAX_PARTS), 1)


@triton.jit
def total_steps(
    query_start_loc, seq_lens, window, num_tokens, num_seqs, max_blocks,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The steps of all tiles of the batch."""
    total = 0
    for begin in range(0, num_seqs, CHUNK):
        _, _, _, _, steps, tiles = sequence_of(
            begin + tl.arange(0, CHUNK), query_start_loc, seq_lens, window, num_tokens, num_seqs,
            max_blocks, BLOCK_SIZE, TOKENS, KEYS, WINDOW,
        )  # fmt: skip
        total += tl.sum(steps * tiles, 0)
    return total


@triton.jit
def find_part(
    number, total, wanted, query_start_loc, seq_lens, window, num_tokens, num_seqs, max_blocks,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
    MIN_STEPS: tl.constexpr, MAX_PARTS: tl.constexpr,
):  # fmt: skip
    """The sequence of the part with a number, the number of parts, and of tiles, before it."""
    seq = 0
    parts_before = 0
    tiles_before = 0
    line = 0
    for begin in range(0, num_seqs, CHUNK):
        ids = begin + tl.arange(0, CHUNK)
        _, _, _, _, steps, tiles = sequence_of(
            ids, query_start_loc, seq_lens, window, num_tokens, num_seqs, max_blocks,
            BLOCK_SIZE, TOKENS, KEYS, WINDOW,
        )  # fmt: skip
        parts = tiles * parts_of(steps, total, wanted, MIN_STEPS, MAX_PARTS)
        passed = (line + tl.cumsum(parts, 0) <= number) & (ids < num_seqs)
        seq += tl.sum(passed.to(tl.int32), 0)
        parts_before += tl.sum(tl.where(passed, parts, 0), 0)
        tiles_before += tl.sum(tl.where(passed, tiles, 0), 0)
        line += tl.sum(parts, 0)
    return seq, parts_before, tiles_before

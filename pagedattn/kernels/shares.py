"""Keys cut into equal shares of the whole batch's work, whatever the lengths of its sequences.

The steps of all tiles, sequence after sequence, are one line; a share is a stretch of it. Where it
lies is computed by each program from the lengths on the device.
"""

import triton
import triton.language as tl


@triton.jit
def sequence_of(
    seq, query_start_loc, seq_lens, window, num_tokens, num_seqs, max_blocks,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Of one sequence or many: where its queries start, their number, its length, its first key
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
def share_length(total, shares, MIN_STEPS: tl.constexpr):
    return tl.maximum((total + shares - 1) // shares, MIN_STEPS)


@triton.jit
def total_steps(
    query_start_loc, seq_lens, window, num_tokens, num_seqs, max_blocks,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    total = 0
    for begin in range(0, num_seqs, 128):
        _, _, _, _, steps, tiles = sequence_of(
            begin + tl.arange(0, 128), query_start_loc, seq_lens, window, num_tokens, num_seqs,
            max_blocks, BLOCK_SIZE, TOKENS, KEYS, WINDOW,
        )  # fmt: skip
        total += tl.sum(steps * tiles, 0)
    return total


@triton.jit
def find_step(
    position, query_start_loc, seq_lens, window, num_tokens, num_seqs, max_blocks,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The sequence that a position of the line lies in, and how many of its steps lie before."""
    seq = 0
    before = 0
    line = 0
    for begin in range(0, num_seqs, 128):
        ids = begin + tl.arange(0, 128)
        _, _, _, _, steps, tiles = sequence_of(
            ids, query_start_loc, seq_lens, window, num_tokens, num_seqs, max_blocks,
            BLOCK_SIZE, TOKENS, KEYS, WINDOW,
        )  # fmt: skip
        work = steps * tiles
        passed = (line + tl.cumsum(work, 0) <= position) & (ids < num_seqs)
        seq += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(tl.where(passed, work, 0), 0)
        line += tl.sum(work, 0)
    return seq, position - before

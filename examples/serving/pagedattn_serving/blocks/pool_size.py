"""How many blocks a pool has, and a sequence takes of it; no arrays, so whoever asks may ask."""

from collections.abc import Iterable

from pagedattn_serving.blocks.limits import Limits

Windows = Iterable[int | None]  # the sliding window of each layer


class PoolSize:
    """The pool of all layers that have the same sliding window, or none.

    With a window, a sequence gives back what lies behind it before it grows, so the pool has no
    more blocks than `max_seqs` sequences can own, nor than `num_blocks`.
    """

    def __init__(self, limits: Limits, window: int | None):
        self.limits, self.window = limits, window
        most = limits.max_seqs * self.most(limits.max_seq_len)
        self.num_blocks = min(limits.num_blocks, most) if window else limits.num_blocks

    def seen(self, num_tokens: int) -> int:
        """How many of the blocks of a sequence, the last ones, its next token sees."""
        hidden = 0 if self.window is None else max(num_tokens - self.window + 1, 0)
        return self.limits.blocks_for(num_tokens) - hidden // self.limits.block_size

    def most(self, num_tokens: int) -> int:
        """How many blocks a sequence of up to so many tokens owns at a time."""
        blocks = self.limits.blocks_for(num_tokens)
        if self.window is None:
            return blocks
        in_sight = self.window + self.limits.max_query_len - 2  # without the last token of a step
        return min(blocks, self.limits.blocks_for(in_sight) + 1)

    def longest(self, width: int) -> int:
        """The tokens that each of `width` sequences may come to if they are alone."""
        blocks, longest = self.num_blocks // width, self.limits.max_seq_len
        return longest if blocks >= self.most(longest) else blocks * self.limits.block_size


def longest(limits: Limits, windows: Windows, width: int) -> int:
    """The tokens that each of `width` sequences may come to in the pools of all layers."""
    pools = (PoolSize(limits, window) for window in set(windows) or {None})
    return min(pool.longest(width) for pool in pools)

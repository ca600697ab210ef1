"""A block pool on the host, and what the engine asks of it.

The pool lies in the host's memory, and its functions run there, each compiled once: what it decides
never waits for the device. A forward gets its tables and lengths as they are when it is enqueued.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int

from pagedattn import (
    BlockPool,
    Growth,
    append_tokens,
    drop_blocks,
    fork,
    hold_blocks,
    init_block_pool,
    release,
    release_behind,
    share_blocks,
)
from pagedattn_serving.blocks.limits import Limits
from pagedattn_serving.blocks.pool_size import PoolSize

append_jit = jax.jit(append_tokens, static_argnames="max_new_tokens")
behind_jit = jax.jit(release_behind, static_argnames=("window", "max_new_tokens"))
fork_jit, hold_jit, drop_jit = jax.jit(fork), jax.jit(hold_blocks), jax.jit(drop_blocks)
release_jit, share_jit = jax.jit(release), jax.jit(share_blocks)


def padded(ids: Sequence[int], length: int) -> Int[np.ndarray, " length"]:
    """The ids, padded with -1, which the functions of the pool skip."""
    return np.array([*ids, *[-1] * (length - len(ids))], np.int32)


def empty_pool(num_blocks: int, block_size: int, **sizes: int) -> BlockPool:
    """A pool in the host's memory, where all that is made of it stays."""
    return jax.device_put(init_block_pool(num_blocks, block_size, **sizes), jax.devices("cpu")[0])


class Blocks(PoolSize):
    """The blocks of all layers that have the same sliding window, or none."""

    def __init__(self, limits: Limits, window: int | None):
        super().__init__(limits, window)
        sizes = {"max_seqs": limits.max_seqs, "max_blocks": limits.max_blocks}
        self.pool = empty_pool(self.num_blocks, limits.block_size, **sizes)

    @property
    def num_free(self) -> int:
        return int(self.pool.num_free)

    def release_behind(self) -> None:
        """Gives back what no further token sees: all that is planned before has been enqueued."""
        if self.window is not None:
            how = {"window": self.window, "max_new_tokens": self.limits.max_query_len}
            self.pool, _ = behind_jit(self.pool, **how)

    def grown(self, counts: Int[np.ndarray, " max_seqs"]) -> tuple[BlockPool, Growth]:
        """The pool with so many new tokens in each row, not yet in place of this one."""
        return append_jit(self.pool, counts, max_new_tokens=self.limits.max_query_len)

    def fork(self, parents: list[int], children: list[int]) -> None:
        rows = (padded(ids, self.limits.max_seqs) for ids in (parents, children))
        self.pool, _ = fork_jit(self.pool, *rows)

    def release(self, rows: Sequence[int]) -> None:
        self.pool, _ = release_jit(self.pool, padded(rows, self.limits.max_seqs))

    def share(self, row: int, blocks: list[int], num_tokens: int) -> None:
        """Starts an unused row with blocks that hold its first tokens already.

        The first ones may be -1, for blocks behind the window.
        """
        table = padded(blocks, self.limits.max_blocks)
        self.pool, _ = share_jit(self.pool, np.int32(row), table, np.int32(num_tokens))

    def hold(self, blocks: list[int]) -> None:
        for chunk in self._chunks(blocks):
            self.pool = hold_jit(self.pool, chunk)

    def drop(self, blocks: list[int]) -> None:
        for chunk in self._chunks(blocks):
            self.pool, _ = drop_jit(self.pool, chunk)

    def tables(self) -> Int[np.ndarray, "max_seqs max_blocks"]:
        return np.asarray(self.pool.block_tables)

    def ref_counts(self) -> Int[np.ndarray, " num_blocks"]:
        return np.asarray(self.pool.ref_counts)

    def _chunks(self, blocks: list[int]):
        """The blocks in padded lists of one length, so that one compiled program serves all."""
        length = self.limits.max_blocks
        for start in range(0, len(blocks), length):
            yield padded(blocks[start : start + length], length)

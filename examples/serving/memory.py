"""The device's memory: the block pool, and the caches of all layers, which follow its decisions.

Every function that changes them is compiled once. Caches are donated to it, so that it works in
place, in a time that does not depend on their size.

The pool lies in the host's memory, and its functions run there: what it decides never waits for the
device. A forward gets its tables and lengths as they are when it is enqueued.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pagedattn import (
    BlockPool,
    KVCache,
    append_tokens,
    copy_blocks,
    drop_blocks,
    fork,
    hold_blocks,
    init_block_pool,
    release,
    share_blocks,
)
from serving.decoder import Decoder
from serving.limits import Limits

append_jit = jax.jit(append_tokens, static_argnames="max_new_tokens")
fork_jit, hold_jit, drop_jit = jax.jit(fork), jax.jit(hold_blocks), jax.jit(drop_blocks)
release_jit, share_jit = jax.jit(release), jax.jit(share_blocks)


@partial(jax.jit, donate_argnums=0)
def copy_jit(caches: list[KVCache], src: Int[Array, " n"], dst: Int[Array, " n"]) -> list[KVCache]:
    return [copy_blocks(cache, src, dst) for cache in caches]


def padded(ids: Sequence[int], length: int) -> Int[np.ndarray, " length"]:
    """The ids, padded with -1, which the functions of the pool skip."""
    return np.array([*ids, *[-1] * (length - len(ids))], np.int32)


def on_host(pool: BlockPool) -> BlockPool:
    """The pool in the host's memory, where all that is made of it stays."""
    return jax.device_put(pool, jax.devices("cpu")[0])


class Memory:
    """A pool of `limits.num_blocks` blocks, and a cache over them for each layer of the model."""

    def __init__(self, limits: Limits, model: Decoder | None = None, dtype=jnp.float32):
        self.limits = limits
        sizes = {"max_seqs": limits.max_seqs, "max_blocks": limits.max_blocks}
        self.pool = on_host(init_block_pool(limits.num_blocks, limits.block_size, **sizes))
        self.caches = caches_of(model, limits.num_blocks, limits.block_size, dtype)
        self.free_rows = list(range(limits.max_seqs))

    @property
    def num_free(self) -> int:
        return int(self.pool.num_free)

    def grow(self, new_tokens: dict[int, int]) -> list[int]:
        """Makes room for all new tokens or none; returns the rows that found too few blocks."""
        counts = np.zeros(self.limits.max_seqs, np.int32)
        counts[list(new_tokens)] = list(new_tokens.values())
        pool, growth = append_jit(self.pool, counts, max_new_tokens=self.limits.max_query_len)
        failed = np.flatnonzero(~np.asarray(growth.ok)).tolist()
        if not failed:
            self.pool = pool
            src, dst = np.asarray(growth.copy_src), np.asarray(growth.copy_dst)
            if (src >= 0).any():
                self.caches = copy_jit(self.caches, src, dst)
        return failed

    def fork(self, parents: list[int], children: list[int]) -> None:
        if parents:
            rows = (padded(ids, self.limits.max_seqs) for ids in (parents, children))
            self.pool, _ = fork_jit(self.pool, *rows)

    def release(self, rows: Sequence[int]) -> None:
        if rows:
            self.pool, _ = release_jit(self.pool, padded(rows, self.limits.max_seqs))

    def share(self, row: int, blocks: list[int], num_tokens: int) -> None:
        """Starts an unused row with blocks that hold its first tokens already."""
        table = padded(blocks, self.limits.max_blocks)
        self.pool, _ = share_jit(self.pool, np.int32(row), table, np.int32(num_tokens))

    def hold(self, blocks: list[int]) -> None:
        for chunk in self._chunks(blocks):
            self.pool = hold_jit(self.pool, chunk)

    def drop(self, blocks: list[int]) -> None:
        for chunk in self._chunks(blocks):
            self.pool, _ = drop_jit(self.pool, chunk)

    def arrays(self) -> BlockPool:
        """The pool as NumPy arrays, for a program on the device."""
        return jax.tree.map(np.asarray, self.pool)

    def tables(self) -> Int[np.ndarray, "max_seqs max_blocks"]:
        return np.asarray(self.pool.block_tables)

    def ref_counts(self) -> Int[np.ndarray, " num_blocks"]:
        return np.asarray(self.pool.ref_counts)

    def _chunks(self, blocks: list[int]):
        """The blocks in padded lists of one length, so that one compiled program serves all."""
        length = self.limits.max_blocks
        for start in range(0, len(blocks), length):
            yield padded(blocks[start : start + length], length)


def caches_of(model: Decoder | None, num_blocks: int, block_size: int, dtype) -> list[KVCache]:
    """A cache for each layer; none without a model, to test the scheduler alone."""
    if model is None:
        return []
    layers = range(model.num_hidden_layers)
    return [model.init_cache(num_blocks, block_size, dtype) for _ in layers]

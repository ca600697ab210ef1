"""The device's memory: the caches of all layers, and the pools whose decisions they follow.

A block behind the window of one layer is in sight of another that has none. So the layers of each
window have a pool of their own, with the same sequences in the same rows.

Every function that changes the caches is compiled once. They are donated to it, so that it works in
place, in a time that does not depend on their size.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pagedattn import BlockPool, KVCache, copy_blocks
from pagedattn_serving.blocks.limits import Limits
from pagedattn_serving.blocks.pool_size import longest
from pagedattn_serving.blocks.pools import Blocks
from pagedattn_serving.families.decoder import Decoder

Caches = list[list[KVCache]]  # of each pool those of its layers


@partial(jax.jit, donate_argnums=0)
def copy_jit(caches: list[KVCache], src: Int[Array, " n"], dst: Int[Array, " n"]) -> list[KVCache]:
    return [copy_blocks(cache, src, dst) for cache in caches]


class Memory:
    """A pool for each window that layers have, and a cache for each layer of the model.

    Without a model there is one pool, to test the scheduler alone.
    """

    def __init__(self, limits: Limits, model: Decoder | None = None, dtype=jnp.float32):
        self.limits = limits
        self.windows = model.windows if model else ()  # of each layer
        self.pools = [Blocks(limits, window) for window in dict.fromkeys(self.windows or (None,))]
        self.caches: Caches = [[] for _ in self.pools]
        for blocks, caches in zip(self.pools, self.caches, strict=True):
            sizes = blocks.num_blocks, limits.block_size
            layers = range(self.windows.count(blocks.window))
            caches += [model.init_cache(*sizes, dtype) for _ in layers if model]
        self.free_rows = list(range(limits.max_seqs))

    @property
    def num_blocks(self) -> list[int]:
        """The size of each pool."""
        return [blocks.num_blocks for blocks in self.pools]

    def most(self, num_tokens: int) -> int:
        """How many blocks, of all pools, a sequence of up to so many tokens owns at a time."""
        return sum(blocks.most(num_tokens) for blocks in self.pools)

    def longest(self, width: int) -> int:
        """The tokens that each of `width` sequences may come to if they are alone."""
        return longest(self.limits, self.windows, width)

    def grow(self, new_tokens: dict[int, int]) -> list[list[int]]:
        """Makes room for all new tokens or none; the rows that found too few blocks, by pool."""
        counts = np.zeros(self.limits.max_seqs, np.int32)
        counts[list(new_tokens)] = list(new_tokens.values())
        for blocks in self.pools:
            blocks.release_behind()
        grown = [blocks.grown(counts) for blocks in self.pools]
        failed = [np.flatnonzero(~np.asarray(growth.ok)).tolist() for _, growth in grown]
        if not any(failed):
            for index, (pool, growth) in enumerate(grown):
                self.pools[index].pool = pool
                src, dst = np.asarray(growth.copy_src), np.asarray(growth.copy_dst)
                if (src >= 0).any():
                    self.caches[index] = copy_jit(self.caches[index], src, dst)
        return failed

    def fork(self, parents: list[int], children: list[int]) -> None:
        if parents:
            for blocks in self.pools:
                blocks.fork(parents, children)

    def release(self, rows: Sequence[int]) -> None:
        if rows:
            for blocks in self.pools:
                blocks.release(rows)

    def arrays(self) -> list[BlockPool]:
        """The pools as NumPy arrays, for a program on the device."""
        return jax.tree.map(np.asarray, [blocks.pool for blocks in self.pools])


def by_layer(windows: tuple[int | None, ...], caches: Caches) -> list[KVCache]:
    """Caches in the order of the layers, from those by pool."""
    pools = {window: iter(own) for window, own in zip(dict.fromkeys(windows), caches, strict=True)}
    return [next(pools[window]) for window in windows]


def by_pool(windows: tuple[int | None, ...], caches: list[KVCache]) -> Caches:
    """The inverse of `by_layer`."""
    layers = list(zip(windows, caches, strict=True))
    return [[c for own, c in layers if own == window] for window in dict.fromkeys(windows)]

"""Taking a request's blocks away to resume it later, by computing again or from host memory."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pagedattn import KVCache, OutOfBlocksError, swap_blocks, swap_in, swap_out
from pagedattn import Swap as Swapped
from pagedattn_serving.blocks.memory import Caches, Memory
from pagedattn_serving.blocks.pools import empty_pool, padded, release_jit
from pagedattn_serving.decoding.request import NO_ROW, Group, Sequence


class Preemption(Protocol):
    """How groups are preempted. `suspend` takes the rows of a group's sequences away."""

    def suspend(self, group: Group) -> None: ...

    def resume(self, sequence: Sequence) -> bool:
        """Tries to bring the cached tokens back into the sequence's new row; whether it has."""
        ...

    def forget(self, group: Group) -> None:
        """Gives back what a suspended group holds: it will not be resumed."""
        ...


class Recompute:
    """Frees the blocks; later all tokens, the generated ones too, are fed again like a prompt."""

    def __init__(self, memory: Memory):
        self.memory = memory

    def suspend(self, group: Group) -> None:
        self.memory.release(group.rows)
        for sequence in group.sequences:
            sequence.row, sequence.num_cached, sequence.num_kept = NO_ROW, 0, 0
            sequence.candidates = ()

    def resume(self, sequence: Sequence) -> bool:
        del sequence
        return False

    def forget(self, group: Group) -> None:
        del group  # it holds nothing


class Swap:
    """Moves blocks to a pool and caches in host memory; if these are full, recomputes."""

    def __init__(self, memory: Memory, num_blocks: int, num_rows: int):
        self.memory, self.recompute = memory, Recompute(memory)
        size, width = memory.limits.block_size, memory.limits.max_blocks
        self.pools = [
            empty_pool(num_blocks, size, max_seqs=num_rows, max_blocks=width) for _ in memory.pools
        ]
        with jax.default_device(jax.devices("cpu")[0]):
            self.caches = [[resized(c, num_blocks) for c in caches] for caches in memory.caches]
        self.free_rows = list(range(num_rows))

    def suspend(self, group: Group) -> None:
        for sequence in group.sequences:
            if sequence.num_cached and self.free_rows:
                self._swap_out(sequence)
        left = [sequence for sequence in group.sequences if sequence.row != NO_ROW]
        self.recompute.suspend(Group(group.request, left))

    def resume(self, sequence: Sequence) -> bool:
        if sequence.host_row == NO_ROW:
            return False
        swaps = self._swaps(swap_in_jit, sequence.host_row, sequence.row)
        if not swaps:  # cannot happen: the scheduler has counted the free blocks
            raise OutOfBlocksError("a request was resumed without room for its blocks")
        self.memory.caches = moved(self.caches, self.memory.caches, swaps)
        self.free_rows.append(sequence.host_row)
        sequence.host_row = NO_ROW
        return True

    def forget(self, group: Group) -> None:
        rows = [s.host_row for s in group.sequences if s.host_row != NO_ROW]
        if rows:
            self.pools = [release_jit(p, padded(rows, p.max_seqs))[0] for p in self.pools]
        self.free_rows += rows
        for sequence in group.sequences:
            sequence.host_row = NO_ROW

    def _swap_out(self, sequence: Sequence) -> None:
        swaps = self._swaps(swap_out_jit, sequence.row, self.free_rows[-1])
        if swaps:
            self.caches = moved(self.memory.caches, self.caches, swaps)
            sequence.row, sequence.host_row = NO_ROW, self.free_rows.pop()

    def _swaps(self, swap_jit: Callable, source: int, target: int) -> list[Swapped]:
        """Moves a row in every pool, or in none; the blocks to copy, by pool."""
        rows = padded([source], 1), padded([target], 1)
        pairs = zip(self.memory.pools, self.pools, strict=True)
        made = [swap_jit(blocks.pool, pool, *rows) for blocks, pool in pairs]
        if not all(swap.ok[0] for *_, swap in made):
            return []
        self.pools = [pool for _, pool, _ in made]
        for blocks, (pool, *_) in zip(self.memory.pools, made, strict=True):
            blocks.pool = pool
        return [swap for *_, swap in made]


swap_in_jit, swap_out_jit = jax.jit(swap_in), jax.jit(swap_out)


def resized(cache: KVCache, num_blocks: int) -> KVCache:
    """An empty cache such as this one, of so many blocks, with scales for each token if it has."""
    return jax.tree.map(lambda held: jnp.zeros((num_blocks, *held.shape[1:]), held.dtype), cache)


def moved(sources: Caches, targets: Caches, swaps: list[Swapped]) -> Caches:
    """The targets, where they lie, with copies of the sources' blocks that were swapped.

    Only these blocks cross between the devices.
    """
    src, dst = ([np.asarray(getattr(swap, side)) for swap in swaps] for side in ("src", "dst"))
    shardings = jax.tree.map(lambda plane: plane.sharding, targets)
    staged = jax.device_put(gather_jit(sources, src), shardings)
    return scatter_jit(staged, targets, dst)


@jax.jit
def gather_jit(caches: Caches, src: list[Int[Array, " _"]]) -> Caches:
    rooms = [
        [resized(cache, len(ids)) for cache in pool] for pool, ids in zip(caches, src, strict=True)
    ]
    return swapped(caches, rooms, src, [jnp.arange(len(ids)) for ids in src])


@partial(jax.jit, donate_argnums=1)
def scatter_jit(staged: Caches, caches: Caches, dst: list[Int[Array, " _"]]) -> Caches:
    return swapped(staged, caches, [jnp.arange(len(ids)) for ids in dst], dst)


def swapped(sources: Caches, targets: Caches, src: list, dst: list) -> Caches:
    """The targets with copies of blocks `src[p]` of each pool's sources at `dst[p]`."""
    return [
        [swap_blocks(s, t, ids, at) for s, t in zip(*pools, strict=True)]
        for *pools, ids, at in zip(sources, targets, src, dst, strict=True)
    ]

"""Taking a request's blocks away to resume it later, by computing again or from host memory."""

from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pagedattn import (
    KVCache,
    OutOfBlocksError,
    init_block_pool,
    swap_blocks,
    swap_in,
    swap_out,
)
from serving.memory import Memory, on_host, padded, release_jit
from serving.request import NO_ROW, Group, Sequence


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
        pool = init_block_pool(num_blocks, size, max_seqs=num_rows, max_blocks=width)
        self.pool = on_host(pool)
        self.host, self.device = jax.devices("cpu")[0], jax.devices()[0]
        with jax.default_device(self.host):
            self.caches = [resized(cache, num_blocks) for cache in memory.caches]
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
        rows = (padded([row], 1) for row in (sequence.host_row, sequence.row))
        self.memory.pool, self.pool, swap = swap_in_jit(self.memory.pool, self.pool, *rows)
        if not swap.ok[0]:  # cannot happen: the scheduler has counted the free blocks
            raise OutOfBlocksError("a request was resumed without room for its blocks")
        self.memory.caches = moved(self.caches, self.memory.caches, swap.src, swap.dst, self.device)
        self.free_rows.append(sequence.host_row)
        sequence.host_row = NO_ROW
        return True

    def forget(self, group: Group) -> None:
        rows = [s.host_row for s in group.sequences if s.host_row != NO_ROW]
        if rows:
            self.pool, _ = release_jit(self.pool, padded(rows, len(self.pool.seq_lens)))
        self.free_rows += rows
        for sequence in group.sequences:
            sequence.host_row = NO_ROW

    def _swap_out(self, sequence: Sequence) -> None:
        rows = (padded([row], 1) for row in (sequence.row, self.free_rows[-1]))
        self.memory.pool, self.pool, swap = swap_out_jit(self.memory.pool, self.pool, *rows)
        if swap.ok[0]:
            self.caches = moved(self.memory.caches, self.caches, swap.src, swap.dst, self.host)
            sequence.row, sequence.host_row = NO_ROW, self.free_rows.pop()


swap_in_jit, swap_out_jit = jax.jit(swap_in), jax.jit(swap_out)


def resized(cache: KVCache, num_blocks: int) -> KVCache:
    """An empty cache such as this one, of so many blocks."""
    return jax.tree.map(lambda plane: jnp.zeros((num_blocks, *plane.shape[1:]), plane.dtype), cache)


def moved(
    sources: list[KVCache],
    targets: list[KVCache],
    src: Int[Array, " n"],
    dst: Int[Array, " n"],
    device,
) -> list[KVCache]:
    """The targets, on `device`, with copies of the sources' blocks `src` at `dst`.

    Only these blocks cross between the devices.
    """
    staged = jax.device_put(gather_jit(sources, np.asarray(src)), device)
    return scatter_jit(staged, targets, np.asarray(dst))


@jax.jit
def gather_jit(caches: list[KVCache], src: Int[Array, " n"]) -> list[KVCache]:
    at = jnp.arange(len(src))
    rooms = [resized(cache, len(src)) for cache in caches]
    return [swap_blocks(cache, room, src, at) for cache, room in zip(caches, rooms, strict=True)]


@partial(jax.jit, donate_argnums=1)
def scatter_jit(staged: list[KVCache], caches: list[KVCache], dst: Int[Array, " n"]):
    at = jnp.arange(len(dst))
    return [swap_blocks(new, cache, at, dst) for new, cache in zip(staged, caches, strict=True)]

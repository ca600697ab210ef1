"""Full blocks that outlive their sequences, to be found again by other prompts that begin alike.

A block's name is a hash of its tokens and of the name of the block before it, so it stands for all
tokens up to the block's end: blocks of one name hold equal keys and values. Of each pool the cache
holds one block of each name. When blocks run out, it drops those that no sequence owns, the least
recently used first.

A prefix is found as far as every pool has what the next token sees of it: all blocks, or, in layers
with a window, the last ones.
"""

import hashlib
from collections import OrderedDict

import numpy as np

from pagedattn_serving.blocks.memory import Memory
from pagedattn_serving.blocks.pools import Blocks
from pagedattn_serving.decoding.request import Group, Sequence


class Named:
    """The named blocks of a pool, least recently used first."""

    def __init__(self, blocks: Blocks):
        self.blocks = blocks
        self.named: OrderedDict[bytes, int] = OrderedDict()

    def keep(self, keys: list[bytes], found: list[int]) -> None:
        """Names and holds blocks, but for those of known names and those given back already."""
        new: dict[bytes, int] = {}
        for key, block in zip(keys, found, strict=True):
            if block >= 0 and key not in self.named:
                new.setdefault(key, block)
        self.blocks.hold(list(new.values()))
        self.named |= new

    def table(self, keys: list[bytes]) -> list[int]:
        """The blocks of these names, -1 for those that the token after them does not see."""
        hidden = len(keys) - self.blocks.seen(len(keys) * self.blocks.limits.block_size)
        return [-1] * hidden + [self.named[key] for key in keys[hidden:]]

    def touch(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            if key in self.named:
                self.named.move_to_end(key)

    def num_evictable(self) -> int:
        return int((self._owners() == 1).sum())

    def evict(self, count: int) -> int:
        owners = self._owners()
        idle = [key for key, alone in zip(self.named, owners == 1, strict=True) if alone]
        self.blocks.drop([self.named.pop(key) for key in idle[:count]])
        return min(count, len(idle))

    def _owners(self) -> np.ndarray:
        """The reference counts of the named blocks."""
        return self.blocks.ref_counts()[list(self.named.values())]


class PrefixCache:
    """The named blocks of a memory, by pool."""

    def __init__(self, memory: Memory):
        self.memory = memory
        self.pools = [Named(blocks) for blocks in memory.pools]
        self.num_hit_tokens = 0

    @property
    def num_held(self) -> list[int]:
        """How many blocks of each pool are named."""
        return [len(pool.named) for pool in self.pools]

    def start(self, sequence: Sequence) -> None:
        """Gives an uncached sequence all cached blocks of its tokens, without the last token.

        That one has to be fed, to get logits.
        """
        self._name_blocks(sequence, len(sequence.tokens) - 1)
        count = self._num_found(sequence.keys)
        if count:
            sequence.num_cached = count * self.memory.limits.block_size
            sequence.num_kept = count
            for pool in self.pools:
                table = pool.table(sequence.keys[:count])
                pool.blocks.share(sequence.row, table, sequence.num_cached)
            self.num_hit_tokens += sequence.num_cached
        self.touch(sequence)

    def keep(self, groups: list[Group]) -> None:
        """Names and holds the blocks that running sequences have filled with known tokens."""
        new: list[tuple[int, int, bytes]] = []  # row, column and name of a block
        for sequence in (s for group in groups for s in group.sequences):
            filled = min(sequence.num_cached, sequence.num_known)
            self._name_blocks(sequence, filled)
            columns = range(sequence.num_kept, filled // self.memory.limits.block_size)
            new += [(sequence.row, column, sequence.keys[column]) for column in columns]
            sequence.num_kept += len(columns)
        rows, columns = np.array([place[:2] for place in new], int).reshape(-1, 2).T
        for pool in self.pools:
            pool.keep([key for *_, key in new], pool.blocks.tables()[rows, columns].tolist())

    def touch(self, sequence: Sequence) -> None:
        """Marks a sequence's blocks as just used.

        Its last blocks will go first, since they are of no use without those before them.
        """
        for pool in self.pools:
            pool.touch(sequence.keys)

    def num_evictable(self) -> list[int]:
        return [pool.num_evictable() for pool in self.pools]

    def evict(self, counts: list[int]) -> int:
        """Frees up to so many blocks of each pool that no sequence owns; returns how many."""
        return sum(pool.evict(count) for pool, count in zip(self.pools, counts, strict=True))

    def _num_found(self, keys: list[bytes]) -> int:
        """The most full blocks that a sequence may start with."""
        size, runs, found = self.memory.limits.block_size, [0] * len(self.pools), 0
        for count, key in enumerate(keys, 1):
            runs = [
                run + 1 if key in pool.named else 0
                for run, pool in zip(runs, self.pools, strict=True)
            ]
            if all(
                run >= pool.blocks.seen(count * size)
                for run, pool in zip(runs, self.pools, strict=True)
            ):
                found = count
        return found

    def _name_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        """Adds to `sequence.keys` the names of its full blocks within the first `num_tokens`."""
        size = self.memory.limits.block_size
        for start in range(len(sequence.keys) * size, num_tokens - size + 1, size):
            parent = sequence.keys[-1] if sequence.keys else b""
            tokens = np.array(sequence.tokens[start : start + size], np.int32).tobytes()
            sequence.keys.append(hashlib.blake2b(parent + tokens, digest_size=16).digest())

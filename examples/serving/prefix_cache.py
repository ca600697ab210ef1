"""Full blocks that outlive their sequences, to be found again by other prompts that begin alike.

A block's name is a hash of its tokens and of the name of the block before it, so it stands for all
tokens up to the block's end: blocks of one name hold equal keys and values. The cache holds one
block of each name. When blocks run out, it drops those that no sequence owns, the least recently
used first.
"""

import hashlib
from collections import OrderedDict

import numpy as np

from serving.memory import Memory
from serving.request import Group, Sequence


class PrefixCache:
    """The named blocks of a memory, least recently used first."""

    def __init__(self, memory: Memory):
        self.memory = memory
        self.blocks: OrderedDict[bytes, int] = OrderedDict()
        self.num_hit_tokens = 0

    def start(self, sequence: Sequence) -> None:
        """Gives an uncached sequence all cached blocks of its tokens, without the last token.

        That one has to be fed, to get logits.
        """
        block_size = self.memory.limits.block_size
        self._name_blocks(sequence, len(sequence.tokens) - 1)
        found = []
        for key in sequence.keys:
            if key not in self.blocks:
                break
            found.append(self.blocks[key])
        if found:
            sequence.num_cached, sequence.num_kept = len(found) * block_size, len(found)
            self.memory.share(sequence.row, found, sequence.num_cached)
            self.num_hit_tokens += sequence.num_cached
        self.touch(sequence)

    def keep(self, groups: list[Group]) -> None:
        """Names and holds the blocks that running sequences have filled with known tokens."""
        tables, added = self.memory.tables(), {}
        for sequence in (s for group in groups for s in group.sequences):
            filled = min(sequence.num_cached, sequence.num_known)
            self._name_blocks(sequence, filled)
            new = slice(sequence.num_kept, filled // self.memory.limits.block_size)
            for key, block in zip(sequence.keys[new], tables[sequence.row, new], strict=True):
                if key not in self.blocks:
                    added.setdefault(key, int(block))
            sequence.num_kept = max(new.start, new.stop)
        self.memory.hold(list(added.values()))
        self.blocks |= added

    def touch(self, sequence: Sequence) -> None:
        """Marks a sequence's blocks as just used.

        Its last blocks will go first, since they are of no use without those before them.
        """
        for key in reversed(sequence.keys):
            if key in self.blocks:
                self.blocks.move_to_end(key)

    def num_evictable(self) -> int:
        return int((self._owners() == 1).sum())

    def evict(self, count: int) -> int:
        """Frees up to `count` blocks that no sequence owns; returns how many it freed."""
        owners = self._owners()
        idle = [key for key, alone in zip(self.blocks, owners == 1, strict=True) if alone]
        self.memory.drop([self.blocks.pop(key) for key in idle[:count]])
        return min(count, len(idle))

    def _owners(self) -> np.ndarray:
        """The reference counts of the named blocks."""
        return self.memory.ref_counts()[list(self.blocks.values())]

    def _name_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        """Adds to `sequence.keys` the names of its full blocks within the first `num_tokens`."""
        size = self.memory.limits.block_size
        for start in range(len(sequence.keys) * size, num_tokens - size + 1, size):
            parent = sequence.keys[-1] if sequence.keys else b""
            tokens = np.array(sequence.tokens[start : start + size], np.int32).tobytes()
            sequence.keys.append(hashlib.blake2b(parent + tokens, digest_size=16).digest())

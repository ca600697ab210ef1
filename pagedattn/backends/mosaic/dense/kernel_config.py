"""The sizes of a call that its program is compiled for."""

import dataclasses
import math

from ...._arrays.namespace import cdiv
from ....spec import AttentionSpec

UNIT = 8  # query tokens of a head that are loaded and stored at once: rows of a shared-memory tile
WARPGROUP = 64  # rows that one warpgroup multiplies
ROWS = 2 * WARPGROUP
UNITS = ROWS // UNIT  # units in a tile of queries, at most


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """What is static: array sizes, the formula, and how the work is cut."""

    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int
    num_seqs: int
    max_blocks: int
    spec: AttentionSpec
    with_lse: bool
    cache_dtype: str | None = None  # of eight bits, if not that of queries
    token_scales: bool = False
    units: int = UNITS  # of a tile
    words: int = 0  # of a token's line, if the drafts branch
    parts: int = 0  # into so many the keys of all sequences are cut; 0: tiles are whole

    @property
    def group(self) -> int:
        """Query heads that share a head of keys."""
        return self.num_heads // self.num_kv_heads

    @property
    def keys(self) -> int:
        """Keys of a step: as many as registers and shared memory hold."""
        return 128 if self.head_dim <= 128 else 64

    @property
    def pages(self) -> int:
        """Loads that bring the keys of a step."""
        return max(1, self.keys // self.block_size)

    @property
    def stages(self) -> int:
        """Steps whose keys, and whose values, are in shared memory at once."""
        return 2

    @property
    def query_slots(self) -> int:
        """Tiles of queries in shared memory at once: beside what is held in eight bits, fewer."""
        if self.head_dim > 128:
            return 1
        return 2 if self.cache_dtype else 3

    @property
    def swizzle(self) -> int:
        """Bytes over which shared memory is permuted, as wide as the head allows."""
        return math.gcd(2 * self.head_dim, 128)

    @property
    def max_tiles(self) -> int:
        """No batch of these sizes has more tiles a key head, padding included."""
        if self.parts:
            padding = cdiv(self.num_tokens, UNIT) * self.group
            return self.num_seqs + cdiv(padding, self.units)
        sequences = min(self.num_seqs + 1, self.num_tokens)
        whole = self.num_tokens * self.group // ROWS
        return max(1, whole + sequences * (1 + cdiv((UNIT - 1) * self.group, ROWS)))


def columns(config: KernelConfig, index: int, parts: int) -> slice:
    """Those of a head that one load or store moves, of so many that move all."""
    width = config.head_dim // parts
    return slice(index * width, (index + 1) * width)

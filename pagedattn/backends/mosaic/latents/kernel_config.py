"""The sizes of a call over latents that its program is compiled for."""

import dataclasses
import math

from ....spec import AttentionSpec

ROWS = 64  # query heads of one token that are multiplied at once, at most
FEWEST_ROWS = 8
KEYS = 64  # keys of a step
HEAD_DIM = 576
VALUE_DIM = 512  # the first columns of a latent are its value
SWIZZLE = 128  # bytes
FEWEST = 4  # steps that are worth a work item of their own


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """What is static: array sizes, the formula, and among how many programs the work is cut."""

    num_tokens: int
    num_heads: int
    num_blocks: int
    block_size: int
    num_seqs: int
    max_blocks: int
    spec: AttentionSpec
    programs: int
    cache_dtype: str | None = None  # of eight bits
    token_scales: bool = False

    @property
    def rows(self) -> int:
        """Query heads of one token that are multiplied at once."""
        return math.gcd(self.num_heads, ROWS // 2 if self.cache_dtype else ROWS)

    @property
    def tiles(self) -> int:
        """Tiles of heads of a token; as many programs read the same keys at the same time."""
        return self.num_heads // self.rows

    @property
    def steps_at_once(self) -> int:
        """Steps come in pairs where two warpgroups take them in turn."""
        return 2 if self.rows == ROWS else 1

    @property
    def cluster(self) -> int:
        """Programs that load the same keys for each other, half of them each.

        Only tiles of 64 heads do.
        """
        return 2 if self.rows == ROWS and self.tiles % 2 == 0 and self.block_size > 8 else 1

    @property
    def parts(self) -> int:
        """Parts of the work; each has a program for every tile of heads."""
        return max(1, self.programs // self.tiles)

    @property
    def overhead(self) -> int:
        """What a work item costs beside its steps, in steps."""
        return 4 if self.rows == ROWS else 2

    @property
    def pages(self) -> int:
        """Pages of a step: whole blocks, or a stretch of KEYS tokens where blocks are longer."""
        return max(1, KEYS // self.block_size)

    @property
    def page_keys(self) -> int:
        """Keys of a page."""
        return min(self.block_size, KEYS)

    @property
    def scale(self) -> float:
        return self.spec.scale_for(HEAD_DIM)

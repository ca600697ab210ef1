"""The sizes of a call over latents that its program is compiled for."""

import dataclasses

from ....spec import AttentionSpec

ROWS = 64  # query heads of one token that are multiplied at once
KEYS = 64  # keys of a step
HEAD_DIM = 576
VALUE_DIM = 512  # the first columns of a latent are its value
HALF = VALUE_DIM // 2  # the columns that one warpgroup sums
REST = HEAD_DIM - VALUE_DIM
SWIZZLE = 128  # bytes
TOP, TOTALS, LSE = 0, (1, 2), 3  # places among the vectors that warpgroups share
OVERHEAD = 4  # what a work item costs beside its steps, in steps
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

    @property
    def tiles(self) -> int:
        """Tiles of heads of a token; as many programs read the same keys at the same time."""
        return self.num_heads // ROWS

    @property
    def cluster(self) -> int:
        """Programs that load the same keys for each other, half of them each."""
        return 2 if self.tiles % 2 == 0 and self.block_size > 8 else 1

    @property
    def parts(self) -> int:
        """Parts of the work; each has a program for every tile of heads."""
        return max(1, self.programs // self.tiles)

    @property
    def slots(self) -> int:
        """Room for partial results: those of the first and of the last token of each part."""
        return 2 * self.parts

    @property
    def joined_at_once(self) -> int:
        """Partial results that are loaded together when they are merged.

        A token that is cut has about `parts / num_tokens` of them, and one or two more. What is
        loaded past its last one is read for nothing.
        """
        return 4 if self.parts > 3 * self.num_tokens else 2

    @property
    def pages(self) -> int:
        """Loads that bring the keys of a step."""
        return max(1, KEYS // self.block_size)

    @property
    def scale(self) -> float:
        return self.spec.scale_for(HEAD_DIM)

"""Sizes of the pools and of a step; the shapes of all arrays follow from these alone."""

from dataclasses import dataclass

from pagedattn.extend import cdiv


@dataclass(frozen=True)
class Limits:
    """The sizes; ValueError if one is below 1, or not all sequences could decode in one step."""

    num_blocks: int = 64  # of each pool; one for layers with a window may need fewer
    block_size: int = 16
    max_seq_len: int = 512  # tokens of one sequence in the cache
    max_seqs: int = 8  # sequences in the pool at a time
    token_budget: int = 64  # tokens a step
    max_query_len: int = 32  # tokens of one prompt a step

    def __post_init__(self):
        if wrong := [f"{name}={size}" for name, size in vars(self).items() if size < 1]:
            raise ValueError(f"expected sizes of 1 and more, got {', '.join(wrong)}")
        if self.token_budget < self.max_seqs:
            raise ValueError(
                f"token_budget must reach max_seqs, {self.max_seqs}, so that all may decode in one "
                f"step; got {self.token_budget}"
            )

    @property
    def max_blocks(self) -> int:
        """Blocks of one sequence."""
        return self.blocks_for(self.max_seq_len)

    def blocks_for(self, num_tokens: int) -> int:
        return cdiv(num_tokens, self.block_size)

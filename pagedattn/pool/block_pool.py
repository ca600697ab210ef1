"""Block management as pure arrays: who owns which block, usable in jit and scan.

A pool knows nothing of keys and values. What it decides is applied to each layer's cache by
`copy_blocks`, `swap_blocks` and `fill_blocks`; in all of them -1 stands for no block.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from .._arrays.namespace import cdiv
from . import checks as validate


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockPool:
    """The blocks of a cache and the sequences that own them: a pytree of int32 arrays.

    A row of `block_tables` is a sequence; a row of length 0 is unused. A block may be in
    several rows: it is shared, and `append_tokens` copies it before it is written.

    Fields:
      free_blocks: a stack; the first `num_free` entries are the blocks that nobody owns.
      num_free: the height of the stack.
      ref_counts: how many rows and holds own each block.
      hold_counts: how many holds (`hold_blocks`) are among them.
      block_tables: the blocks of each sequence; the first ones are -1 where `release_behind` gave
        them back, entries past its length are unspecified.
      seq_lens: tokens of each sequence.
      block_size: tokens a block; static.

    >>> pool = init_block_pool(4, 16, max_seqs=2, max_blocks=3)
    >>> pool.num_blocks, pool.block_tables.shape, pool.seq_lens.tolist()
    (4, (2, 3), [0, 0])
    """

    free_blocks: Int[Array, "num_blocks"]
    num_free: Int[Array, ""]
    ref_counts: Int[Array, "num_blocks"]
    hold_counts: Int[Array, "num_blocks"]
    block_tables: Int[Array, "max_seqs max_blocks"]
    seq_lens: Int[Array, "max_seqs"]
    block_size: int = field(metadata={"static": True})

    @property
    def num_blocks(self) -> int:
        return self.ref_counts.shape[0]

    @property
    def max_seqs(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def max_blocks(self) -> int:
        return self.block_tables.shape[1]

    @property
    def seq_blocks(self) -> Int[Array, "max_seqs"]:
        """How many entries of its row each sequence uses: blocks, and -1 for those given back."""
        return cdiv(self.seq_lens, self.block_size)


def init_block_pool(
    num_blocks: int, block_size: int, *, max_seqs: int, max_blocks: int
) -> BlockPool:
    """A pool with all its blocks free.

    Args:
      num_blocks, block_size: as in the caches that the pool manages.
      max_seqs: how many sequences can live at once.
      max_blocks: how many blocks a sequence can own.

    Raises:
      InvalidInputError: a size is not an integer above 0, or slots would not fit int32.

    >>> int(init_block_pool(4, 16, max_seqs=2, max_blocks=3).num_free)
    4
    """
    num_blocks, block_size, max_seqs, max_blocks = validate.counts(
        num_blocks=num_blocks, block_size=block_size, max_seqs=max_seqs, max_blocks=max_blocks
    )
    return BlockPool(
        free_blocks=jnp.arange(num_blocks, dtype=jnp.int32)[::-1],
        num_free=jnp.int32(num_blocks),
        ref_counts=jnp.zeros(num_blocks, jnp.int32),
        hold_counts=jnp.zeros(num_blocks, jnp.int32),
        block_tables=jnp.full((max_seqs, max_blocks), -1, jnp.int32),
        seq_lens=jnp.zeros(max_seqs, jnp.int32),
        block_size=block_size,
    )


def given_back(tables: Int[Array, "*rows max_blocks"]) -> Bool[Array, "*rows max_blocks"]:
    """True for the -1 that a row begins with: blocks behind a window, see `release_behind`."""
    return jnp.cumsum(tables != -1, axis=-1, dtype=jnp.int32) == 0

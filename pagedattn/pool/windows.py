"""Giving back what lies behind a sliding window while the sequences go on."""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Int

from ..checks import count
from ..ragged import add_at
from . import checks as validate
from .block_pool import BlockPool
from .sharing import push_free


def release_behind(
    pool: BlockPool, window: int
) -> tuple[BlockPool, Int[Array, "max_seqs max_blocks"]]:
    """Gives back the blocks of every sequence that no further token of it sees.

    The next token stands at position `seq_len` at least and sees the keys from `seq_len - window +
    1` on. Blocks that end before that key leave their sequence, and become free if nobody else owns
    or holds them; -1 takes their place in `block_tables`, and no query follows it. So a sequence
    holds `ceil(window / block_size) + 1` blocks at most, and what it has appended since.

    Call it when the step's attention has run in all layers that share the pool, which is as well as
    before the next `append_tokens`: the tokens just appended still see keys that it gives back.
    The layers of a pool must all have a window, and `window` is the widest; layers without one,
    or with a much wider one, take a pool and tables of their own.
    Calling it again changes nothing. A sequence's length is bounded by its row as before: to
    `max_blocks * block_size` tokens, those behind the window included.

    Args:
      window: the `sliding_window` of the layers' `AttentionSpec`; static.

    Returns:
      the pool, and the blocks that became free, each once, -1 in place of the others.

    Raises:
      InvalidInputError: arrays of wrong shapes; a window that is not an integer above 0.

    >>> from pagedattn import append_tokens, init_block_pool
    >>> pool, _ = append_tokens(init_block_pool(4, 4, max_seqs=2, max_blocks=3), jnp.array([10, 0]))
    >>> pool, freed = release_behind(pool, 4)  # the next token, at 10, sees 7, 8, 9 and itself
    >>> pool.block_tables[0].tolist(), int(pool.num_free)
    ([-1, 1, 2], 2)
    """
    pool, window = validate.pool(pool), count("window", window)
    kept = (pool.seq_lens - window + 1) // pool.block_size  # the column of the first key in sight
    behind = jnp.arange(pool.max_blocks, dtype=jnp.int32) < kept[:, None]
    blocks = jnp.where(behind, pool.block_tables, -1)
    tables = jnp.where(behind, -1, pool.block_tables)
    pool = replace(pool, block_tables=tables, ref_counts=add_at(pool.ref_counts, blocks, -1))
    unowned = (blocks >= 0) & (pool.ref_counts.at[blocks].get(mode="clip") == 0)
    freed = jnp.where(unowned & _is_last_naming(pool, blocks), blocks, -1)
    return push_free(pool, freed.ravel()), freed


def _is_last_naming(pool, blocks):
    """True once for each block, however many rows name it; anything for -1."""
    at = jnp.arange(blocks.size, dtype=jnp.int32).reshape(blocks.shape)
    named = jnp.where(blocks >= 0, blocks, pool.num_blocks)
    last = jnp.zeros(pool.num_blocks, jnp.int32).at[named].max(at, mode="drop")
    return last.at[blocks].get(mode="clip") == at

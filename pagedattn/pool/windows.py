"""Giving back what lies behind a sliding window while the sequences go on."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from . import checks as validate
from .block_pool import BlockPool
from .releasing import leave_columns


def release_behind(
    pool: BlockPool, window: int, *, max_new_tokens: int | None = None
) -> tuple[BlockPool, Int[Array, "max_seqs columns"]]:
    """Gives back the blocks of every sequence that none of its later tokens will see.

    The next token has position `seq_len` at least, and sees the keys from `seq_len - window + 1`
    on. Blocks that end before that key leave their sequence, and become free if nobody else owns
    or holds them; -1 takes their place in `block_tables`, and no query follows it. So a sequence
    owns `ceil(window / block_size) + 1` blocks at most, and what it appends until the next call.

    Call it after the attention of all layers that share the pool, since the step's own tokens may
    still see keys that it gives back, and before the next `next_batches`. Each of these layers
    must have a window, and `window` is the widest of them. Layers without one need a pool, tables
    and caches of their own. Calling it again changes nothing.

    A sequence still has a place in its row for every token that it ever had: `max_blocks *
    block_size` bounds its length as before.

    Args:
      window: the `sliding_window` of the layers' `AttentionSpec`; static.
      max_new_tokens: a static bound on the tokens that a sequence got since the last call, None for
        what a table row holds. The work is O(max_seqs * blocks of that bound), plus one look at
        the tables. Later calls give back what exceeds it.

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
    pool, window, most = validate.behind(pool, window, max_new_tokens)
    return leave_columns(pool, _columns_behind(pool, window, most))


def _columns_behind(pool, window, most):
    """Up to `most` columns of each row with blocks behind the window; past the row for none."""
    kept = ((pool.seq_lens - window + 1) // pool.block_size)[:, None]  # that of the first key seen
    before = jnp.arange(pool.max_blocks, dtype=jnp.int32)[None] < kept
    gone = (before & (pool.block_tables == -1)).sum(axis=1, dtype=jnp.int32)
    columns = gone[:, None] + jnp.arange(most, dtype=jnp.int32)[None]
    return jnp.where(columns < kept, columns, pool.max_blocks)

"""Sharing blocks between sequences, and keeping them for later ones."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Integer

from .._arrays.devices import on_one_device
from .._arrays.namespace import add_at, cdiv, in_range, set_at
from . import checks as validate
from .block_pool import BlockPool, given_back


@on_one_device
def fork(
    pool: BlockPool, parents: Integer[Any, "num_forks"], children: Integer[Any, "num_forks"]
) -> tuple[BlockPool, Bool[Array, "num_forks"]]:
    """Makes unused row `children[i]` a sequence with the blocks of row `parents[i]`, all at once.

    Nothing is copied now: whoever first writes to a block that is still shared gets its own copy
    then (`append_tokens`). A child of -1 is skipped.

    Returns:
      the pool, and whether each fork was made: not if the child is in use or named twice.

    Raises:
      InvalidInputError: arrays of wrong shapes; outside jit also rows that the pool does not have.

    >>> from pagedattn import append_tokens, init_block_pool
    >>> pool, _ = append_tokens(init_block_pool(4, 4, max_seqs=2, max_blocks=2), jnp.array([5, 0]))
    >>> pool, made = fork(pool, jnp.array([0]), jnp.array([1]))
    >>> made.tolist(), pool.seq_lens.tolist(), int(pool.num_free)
    ([True], [5, 5], 2)
    """
    pool = validate.pool(pool)
    parents, children = validate.rows(pool.max_seqs, parents=parents, children=children)
    known = in_range(parents, pool.max_seqs) & in_range(children, pool.max_seqs)
    unused = pool.seq_lens.at[children].get(mode="clip") == 0
    made = known & unused & ~_named_before(children, known)
    tables = pool.block_tables.at[parents].get(mode="clip")
    lens = jnp.where(made, pool.seq_lens.at[parents].get(mode="clip"), 0)
    return _adopt(pool, jnp.where(made, children, -1), tables, lens), made


@on_one_device
def share_blocks(
    pool: BlockPool,
    seq: Integer[Any, ""] | int,
    blocks: Integer[Any, "num_shared"],
    num_tokens: Integer[Any, ""] | int,
) -> tuple[BlockPool, Bool[Array, ""]]:
    """Starts unused row `seq` with owned blocks that hold its first `num_tokens` tokens already.

    This is prefix sharing: the blocks are another sequence's, or kept by `hold_blocks`. Entries
    of `blocks` past those tokens may be anything. The first ones may be -1, for blocks behind the
    window that `release_behind` gave back.

    Returns:
      the pool, and whether it was done: not if the row is in use, or a block is unowned or named
      twice; inside jit also not if the blocks do not hold so many tokens.

    Raises:
      InvalidInputError: arrays of wrong shapes; outside jit also rows or blocks that the pool does
        not have, or more tokens than the blocks hold.

    >>> from pagedattn import append_tokens, init_block_pool
    >>> pool, _ = append_tokens(init_block_pool(4, 4, max_seqs=2, max_blocks=2), jnp.array([5, 0]))
    >>> pool, made = share_blocks(pool, 1, pool.block_tables[0, :1], 4)
    >>> pool.ref_counts[pool.block_tables[0]].tolist()
    [2, 1]
    """
    pool = validate.pool(pool)
    seq, blocks, num_tokens = validate.prefix(seq, blocks, num_tokens, pool)
    used = jnp.arange(len(blocks), dtype=jnp.int32) < cdiv(num_tokens, pool.block_size)
    used &= ~given_back(blocks)
    made = in_range(seq, pool.max_seqs) & (pool.seq_lens.at[seq].get(mode="clip") == 0)
    made &= (num_tokens == 0) | used.any()  # less than no tokens use nothing
    made &= num_tokens <= len(blocks) * pool.block_size
    made &= ~(used & (_owned(pool, blocks) < 0)).any() & ~_named_before(blocks, used).any()
    table = jnp.full(pool.max_blocks, -1, jnp.int32).at[: len(blocks)].set(blocks)
    return _adopt(pool, jnp.where(made, seq, -1)[None], table[None], num_tokens[None]), made


@on_one_device
def hold_blocks(pool: BlockPool, blocks: Integer[Any, "n"]) -> BlockPool:
    """Keeps owned blocks from being freed when their sequences are released: a prefix cache.

    Each hold of a block counts, and ends with one `drop_blocks`. -1 and unowned blocks are skipped.

    Raises:
      InvalidInputError: arrays of wrong shapes; outside jit also blocks the pool does not have.

    >>> from pagedattn import append_tokens, init_block_pool, release
    >>> pool, _ = append_tokens(init_block_pool(4, 4, max_seqs=2, max_blocks=2), jnp.array([5, 0]))
    >>> pool, freed = release(hold_blocks(pool, jnp.array([0])), jnp.array([0]))
    >>> freed.tolist(), int(pool.num_free)
    ([[-1, 1]], 3)
    """
    pool = validate.pool(pool)
    owned = _owned(pool, validate.ids_or_none("blocks", blocks, pool.num_blocks))
    return replace(
        pool,
        ref_counts=add_at(pool.ref_counts, owned, 1),
        hold_counts=add_at(pool.hold_counts, owned, 1),
    )


def _adopt(pool, rows, tables, lens):
    """Sets tables and lengths of rows (-1: none), and counts one more owner of their blocks."""
    used = jnp.arange(pool.max_blocks)[None] < cdiv(lens, pool.block_size)[:, None]
    blocks = jnp.where(used & (rows >= 0)[:, None], tables, -1)
    return replace(
        pool,
        ref_counts=add_at(pool.ref_counts, blocks, 1),
        block_tables=set_at(pool.block_tables, rows, tables),
        seq_lens=set_at(pool.seq_lens, rows, lens),
    )


def _named_before(ids, counted):
    """True for each counted id that an earlier counted id equals."""
    same = (ids[:, None] == ids[None]) & counted[:, None] & counted[None]
    return (same & jnp.tri(len(ids), k=-1, dtype=bool)).any(axis=1)


def _owned(pool, blocks):
    """The blocks, -1 in place of those that do not exist or that nobody owns."""
    counts = pool.ref_counts.at[blocks].get(mode="clip")
    return jnp.where(in_range(blocks, pool.num_blocks) & (counts > 0), blocks, -1)

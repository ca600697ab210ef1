"""Giving blocks back: sequences that end, and holds that do."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Integer

from .._arrays.devices import on_one_device
from .._arrays.namespace import add_at, in_range, set_at
from .._arrays.shard_map import varying_alike
from . import checks as validate
from .block_pool import BlockPool


@on_one_device
def drop_blocks(pool: BlockPool, blocks: Integer[Any, "n"]) -> tuple[BlockPool, Int[Array, "n"]]:
    """Ends a hold on each of the blocks; -1, and blocks that are not held, are skipped.

    Returns:
      the pool, and the blocks that became free, -1 in place of the others.

    Raises:
      InvalidInputError: arrays of wrong shapes; outside jit also blocks the pool does not have.

    >>> from pagedattn import append_tokens, hold_blocks, init_block_pool
    >>> pool, _ = append_tokens(init_block_pool(4, 4, max_seqs=2, max_blocks=2), jnp.array([5, 0]))
    >>> pool, _ = release(hold_blocks(pool, jnp.array([0])), jnp.array([0]))
    >>> pool, freed = drop_blocks(pool, jnp.array([0, 1]))
    >>> freed.tolist(), int(pool.num_free)
    ([0, -1], 4)
    """
    pool = validate.pool(pool)
    blocks = validate.ids_or_none("blocks", blocks, pool.num_blocks)
    return jax.lax.scan(_drop_one, *varying_alike((pool, blocks)))


@on_one_device
def release(
    pool: BlockPool, seqs: Integer[Any, "num_released"]
) -> tuple[BlockPool, Int[Array, "num_released max_blocks"]]:
    """Ends sequences: their rows are unused again, and blocks that nobody else owns are free.

    An unused row, and -1, are skipped; so releasing twice does nothing.

    Returns:
      the pool, and the blocks that became free, -1 in place of the others. `fill_blocks`
      overwrites them in a cache where one tenant's data must not be readable by the next.

    Raises:
      InvalidInputError: arrays of wrong shapes; outside jit also rows that the pool does not have.

    >>> from pagedattn import append_tokens, init_block_pool
    >>> pool, _ = append_tokens(init_block_pool(4, 4, max_seqs=2, max_blocks=2), jnp.array([5, 0]))
    >>> pool, freed = release(pool, jnp.array([0, 1]))
    >>> freed.tolist(), int(pool.num_free)
    ([[0, 1], [-1, -1]], 4)
    """
    pool = validate.pool(pool)
    (seqs,) = validate.rows(pool.max_seqs, seqs=seqs)
    return jax.lax.scan(_release_one, *varying_alike((pool, seqs)))


# Not inside the functions that scan them: outside jit a new body would be a new program.


def _drop_one(pool, block):
    held = pool.hold_counts.at[block].get(mode="clip") > 0
    block = jnp.where(in_range(block, pool.num_blocks) & held, block, -1)[None]
    pool = replace(pool, hold_counts=add_at(pool.hold_counts, block, -1))
    pool, freed = _give_back(pool, block)
    return pool, freed[0]


def _release_one(pool, seq):
    row = pool.block_tables.at[seq].get(mode="clip")
    owned = jnp.arange(pool.max_blocks) < pool.seq_blocks.at[seq].get(mode="clip")
    known = in_range(seq, pool.max_seqs)
    pool, freed = _give_back(pool, jnp.where(owned & known, row, -1))
    lens = set_at(pool.seq_lens, jnp.where(known, seq, -1), 0)
    return replace(pool, seq_lens=lens), freed


def _give_back(pool, blocks):
    """Takes one reference from each of the distinct blocks (-1: none); frees those without any."""
    ref_counts = add_at(pool.ref_counts, blocks, -1)
    unowned = (blocks >= 0) & (ref_counts.at[blocks].get(mode="clip") == 0)
    freed = jnp.where(unowned, blocks, -1)
    return push_free(replace(pool, ref_counts=ref_counts), freed), freed


def push_free(pool: BlockPool, blocks: Int[Array, "n"]) -> BlockPool:
    """The pool with distinct blocks that nobody owns (-1: none) on its stack of free ones."""
    freed = blocks >= 0
    at = jnp.where(freed, pool.num_free + jnp.cumsum(freed, dtype=jnp.int32) - 1, -1)
    return replace(
        pool,
        free_blocks=set_at(pool.free_blocks, at, blocks),
        num_free=pool.num_free + freed.sum(dtype=jnp.int32),
    )


def leave_columns(
    pool: BlockPool, columns: Int[Array, "max_seqs n"]
) -> tuple[BlockPool, Int[Array, "max_seqs n"]]:
    """The pool whose rows have -1 in columns, distinct ones of each row, or past it for none.

    Also gives the blocks that became free, each once, -1 in place of the others.
    """
    rows, tables = jnp.arange(pool.max_seqs)[:, None], pool.block_tables
    blocks = tables.at[rows, columns].get(mode="fill", fill_value=-1)
    tables = tables.at[rows, columns].set(-1, mode="drop")
    ref_counts = add_at(pool.ref_counts, blocks, -1)
    unowned = (blocks >= 0) & (ref_counts.at[blocks].get(mode="clip") == 0)
    freed = jnp.where(unowned & _is_last_naming(pool, blocks), blocks, -1)
    pool = replace(pool, block_tables=tables, ref_counts=ref_counts)
    return push_free(pool, freed.ravel()), freed


def _is_last_naming(pool, blocks):
    """True once for each block, however many rows name it; anything for -1."""
    at = jnp.arange(blocks.size, dtype=jnp.int32).reshape(blocks.shape)
    named = jnp.where(blocks >= 0, blocks, pool.num_blocks)
    last = jnp.zeros(pool.num_blocks, jnp.int32).at[named].max(at, mode="drop")
    return last.at[blocks].get(mode="clip") == at

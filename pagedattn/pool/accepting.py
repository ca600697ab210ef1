"""Keeping one branch of each draft tree, and taking the other tokens back."""

from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Integer

from .._arrays.devices import on_one_device
from .._arrays.namespace import cdiv
from ..batch import validate as validate_batch
from ..batch.indices import PAD_SLOT, slot_mapping
from ..batch.metadata import BatchMetadata
from ..writes import move_slots
from . import checks as validate
from .block_pool import BlockPool
from .releasing import leave_columns

Caches = TypeVar("Caches")  # a KVCache, or a list or another tree of them


@on_one_device
def accept_tokens(
    pool: BlockPool,
    caches: Caches,
    path: Integer[Any, "max_seqs max_depth"],
    batch: BatchMetadata,
) -> tuple[BlockPool, Caches, Bool[Array, "max_seqs"]]:
    """Keeps one line of each sequence's new tokens, and takes the others back.

    The keys and values of the line move to consecutive slots after the context, in every cache, and
    the sequence ends with them; blocks without a token leave it, and become free if nobody else
    owns or holds them. So a step with drafts is `next_batch` with `parents`, the writes and the
    attention of all layers, this, and then, for layers with windows, `release_behind`. Each of
    several pools has its own caches and batch. Donate pool and caches, and it works in place.

    Args:
      caches: those of all layers whose blocks the pool manages.
      path: of each sequence, the indices among its new tokens of those to keep, the first one
        first; -1 and all after it are none. A row of -1 alone takes all new tokens back.
      batch: that of the step. Sequences that bring no tokens in it stay as they are.

    Returns:
      the pool, the caches, and for which sequences it was done: not for those that had no room in
      the step or have another length since, nor where a slot to move to lies in a block that
      another sequence shares or that is held. These stay as they are.

    Raises:
      InvalidInputError: arrays of wrong shapes; outside jit also a path that does not rise, or
        leaves the new tokens. Inside jit such a path ends before.

    >>> from pagedattn import init_block_pool, init_kv_cache, next_batch
    >>> pool, sizes = init_block_pool(4, 4, max_seqs=1, max_blocks=4), {"max_query_len": 5}
    >>> parents = jnp.array([-1, 0, 0, 2, 2])
    >>> pool, batch, _ = next_batch(pool, jnp.array([5]), num_tokens=5, parents=parents, **sizes)
    >>> cache = init_kv_cache(4, 4, 1, 8)
    >>> pool, cache, done = accept_tokens(pool, cache, jnp.array([[0, 2, 4]]), batch)
    >>> pool.seq_lens.tolist(), int(pool.num_free), done.tolist()
    ([3], 3, [True])
    """
    pool = validate.pool(pool)
    validate_batch.shapes(batch)
    validate.caches(caches)
    path = validate.path(path, batch, pool)
    query_lens, contexts = batch.query_lens, pool.seq_lens - batch.query_lens
    kept = _rising(path, query_lens)
    count = kept.sum(axis=1, dtype=jnp.int32)
    src, dst = _moves(pool, contexts, jnp.where(kept, path, -1))
    grown = (query_lens > 0) & (batch.seq_lens > 0) & (batch.seq_lens == pool.seq_lens)
    done = grown & ~_shared(pool, dst).any(axis=1)
    dst = jnp.where(done[:, None], dst, PAD_SLOT).ravel()
    caches = jax.tree.map(
        lambda cache: move_slots(cache, src.ravel(), dst), caches, is_leaf=validate.is_cache
    )
    lens = jnp.where(done, contexts + count, pool.seq_lens)
    return _ended(pool, lens, batch.max_query_len), caches, done


def _rising(path, query_lens):
    """The entries of a path up to the first that is none."""
    before = jnp.pad(path, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    fits = (path > before) & (path < query_lens[:, None])
    return jnp.cumprod(fits, axis=1, dtype=jnp.int32) == 1


def _moves(pool, contexts, path):
    """From which slot to which the tokens of a path move; -1 to stay."""
    places = jnp.arange(path.shape[1], dtype=jnp.int32)[None]
    rows = jnp.broadcast_to(jnp.arange(pool.max_seqs, dtype=jnp.int32)[:, None], path.shape)
    moves = (path >= 0) & (path != places)
    ends = (jnp.where(moves, contexts[:, None] + index, -1) for index in (path, places))
    size = pool.block_size
    return [slot_mapping(pool.block_tables, rows, at, block_size=size) for at in ends]


def _shared(pool, slots):
    owners = pool.ref_counts.at[slots // pool.block_size].get(mode="clip")
    return (slots >= 0) & (owners > 1)


def _ended(pool, lens, max_query_len):
    """The pool with sequences that end earlier, without the blocks behind their ends."""
    most = min(cdiv(max_query_len, pool.block_size) + 1, pool.max_blocks)
    columns = cdiv(lens, pool.block_size)[:, None] + jnp.arange(most, dtype=jnp.int32)[None]
    columns = jnp.where(columns < pool.seq_blocks[:, None], columns, pool.max_blocks)
    pool, _ = leave_columns(pool, columns)
    return replace(pool, seq_lens=lens)

"""Batches of a block pool's sequences: a step's new tokens, with and without room for them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Integer

from .._arrays.devices import on_one_device
from ..batch.draft_tree import draft_tree, tree_positions
from ..batch.indices import positions, sequence_ids, slot_mapping
from ..batch.metadata import BatchMetadata
from . import checks as validate
from .block_pool import BlockPool
from .growth import Growth, append_tokens


@on_one_device
def next_batch(
    pool: BlockPool,
    query_lens: Integer[Any, "max_seqs"],
    *,
    num_tokens: int,
    max_query_len: int,
    parents: Integer[Any, "num_tokens"] | None = None,
) -> tuple[BlockPool, BatchMetadata[Array], Growth]:
    """Makes room for `query_lens[s]` new tokens of each sequence, and the batch of these tokens.

    This begins a step: copy the blocks of the `Growth` in every layer's cache, write the new keys
    and values to the slots of the batch, attend. A sequence without room for its tokens
    (`growth.ok` is False) stays as it was in pool and cache, and may bring the same tokens again
    later. Its tokens keep their place in the packed batch, but have position 0 and slot -1 and
    see no key: out is 0 and lse -inf (with `sinks`, the sink). Which sequences
    grow is as in `append_tokens`.

    Layers with other windows have pools of their own: see `next_batches`.

    Args:
      query_lens: new tokens, packed one sequence after the other; 0 leaves a sequence alone.
      num_tokens: length of the packed token axis, static; at least `sum(query_lens)`.
      max_query_len: static bound on `query_lens`.
      parents: i32[num_tokens], of draft trees, as in `make_batch`; entries of padding tokens
        may be anything. None: each token follows the one before it.

    Returns:
      the pool, the batch, and a `Growth`: which sequences have grown, and which blocks to copy.

    Raises:
      InvalidInputError: arrays of wrong shapes; outside jit also negative numbers of tokens, or
        more than `num_tokens` or `max_query_len`, or parents that do not come before their tokens.
        Inside jit, where a number of tokens is wrong, its sequence and all behind it do not grow,
        and a wrong parent is taken for -1, none.

    >>> from pagedattn import init_block_pool
    >>> pool, sizes = init_block_pool(2, 4, max_seqs=2, max_blocks=2), {"max_query_len": 4}
    >>> pool, batch, growth = next_batch(pool, jnp.array([4, 3]), num_tokens=7, **sizes)
    >>> pool, batch, growth = next_batch(pool, jnp.array([1, 1]), num_tokens=2, **sizes)
    >>> growth.ok.tolist(), batch.slot_mapping.tolist(), pool.seq_lens.tolist()
    ([False, True], [-1, 7], [4, 4])
    """
    pool = validate.pool(pool)
    query_lens, sizes = validate.packing(query_lens, pool.max_seqs, num_tokens, max_query_len)
    parents = validate.parents(parents, query_lens, num_tokens)
    fitting = _fitting(query_lens, *sizes)
    return _step(pool, fitting, fitting == query_lens, *sizes, parents)


@on_one_device
def next_batches(
    pools: Sequence[BlockPool],
    query_lens: Integer[Any, "max_seqs"],
    *,
    num_tokens: int,
    max_query_len: int,
    parents: Integer[Any, "num_tokens"] | None = None,
) -> tuple[list[BlockPool], list[BatchMetadata[Array]], list[Growth]]:
    """`next_batch` of the same sequences in several pools: they grow in all of them, or in none.

    Layers with different windows have pools of their own, see `release_behind`.

    Returns:
      the pools, a batch for each, and a `Growth` for each: `ok` is the same in all.

    Raises:
      InvalidInputError: as `next_batch`; no list of pools, or pools of different `max_seqs`.

    >>> from pagedattn import init_block_pool
    >>> pools = [init_block_pool(n, 4, max_seqs=2, max_blocks=2) for n in (2, 1)]
    >>> new, sizes = jnp.array([4, 3]), {"num_tokens": 7, "max_query_len": 4}
    >>> pools, batches, growths = next_batches(pools, new, **sizes)
    >>> [growth.ok.tolist() for growth in growths], [int(pool.num_free) for pool in pools]
    ([[True, False], [True, False]], [1, 0])
    """
    pools = validate.pools(pools)
    query_lens, sizes = validate.packing(query_lens, pools[0].max_seqs, num_tokens, max_query_len)
    parents = validate.parents(parents, query_lens, num_tokens)
    fitting = _fitting(query_lens, *sizes)
    ok = fitting == query_lens
    for pool in pools:
        ok &= append_tokens(pool, fitting, max_new_tokens=max_query_len)[1].ok
    steps = [_step(pool, fitting, ok, *sizes, parents) for pool in pools]
    grown, batches, growths = map(list, zip(*steps, strict=True))
    return grown, batches, growths


@on_one_device
def batch_from_pool(
    pool: BlockPool,
    query_lens: Integer[Any, "max_seqs"],
    *,
    num_tokens: int,
    max_query_len: int,
    parents: Integer[Any, "num_tokens"] | None = None,
) -> BatchMetadata[Array]:
    """The batch in which each sequence's last `query_lens[s]` tokens are the new ones.

    For tokens that the pool has room for already: those of a sequence that `append_tokens` could
    not grow are cached ones, and would be written over. `next_batch` appends and knows which.
    Sequences with no query stay in the batch and cost little.

    Args:
      num_tokens: length of the packed token axis, static; at least `sum(query_lens)`.
      max_query_len: static bound on `query_lens`.
      parents: as in `next_batch`.

    Raises:
      InvalidInputError: arrays of wrong shapes; outside jit also lengths that the sequences do not
        have, or that exceed `num_tokens` or `max_query_len`, or parents as in `next_batch`. Inside
        jit the tokens of a sequence that is shorter have slot -1 and see no key; so have those of
        the first sequence that exceeds a bound, and of all behind it.

    >>> from pagedattn import append_tokens, init_block_pool
    >>> pool, _ = append_tokens(init_block_pool(4, 4, max_seqs=2, max_blocks=2), jnp.array([5, 0]))
    >>> batch_from_pool(pool, jnp.array([2, 0]), num_tokens=3, max_query_len=2).positions.tolist()
    [3, 4, 0]
    """
    pool = validate.pool(pool)
    query_lens, sizes = validate.packing(query_lens, pool.max_seqs, num_tokens, max_query_len)
    validate.appended(query_lens, pool.seq_lens)
    parents = validate.parents(parents, query_lens, num_tokens)
    fitting = _fitting(query_lens, *sizes)
    return _batch(pool, fitting, fitting <= pool.seq_lens, *sizes, parents)


def _fitting(query_lens, num_tokens, max_query_len):
    """The new tokens of each sequence, 0 from the first one on whose do not fit the static sizes.

    Later ones go too, since nobody knows where the caller has packed their tokens.
    """
    starts = jnp.cumsum(query_lens, dtype=jnp.int32) - query_lens
    fits = (query_lens >= 0) & (query_lens <= min(max_query_len, num_tokens))
    fits &= query_lens <= num_tokens - starts
    return jnp.where(jnp.cumsum(~fits, dtype=jnp.int32) == 0, query_lens, 0)


def _step(pool, new, may_grow, num_tokens, max_query_len, parents):
    pool, growth = append_tokens(pool, jnp.where(may_grow, new, 0), max_new_tokens=max_query_len)
    growth = replace(growth, ok=may_grow & growth.ok)
    return pool, _batch(pool, new, growth.ok, num_tokens, max_query_len, parents), growth


def _batch(pool, query_lens, ok, num_tokens, max_query_len, parents):
    """Sequences that are not `ok` have no keys: their tokens stand before the first position."""
    ends = jnp.cumsum(query_lens, dtype=jnp.int32)
    starts, seq_lens = jnp.append(jnp.int32(0), ends), jnp.where(ok, pool.seq_lens, 0)
    seq_ids, at = sequence_ids(starts, num_tokens), positions(starts, seq_lens, num_tokens)
    slots = slot_mapping(pool.block_tables, seq_ids, at, block_size=pool.block_size)
    tree = None
    if parents is not None:
        tree = draft_tree(parents, starts, max_query_len)
        at = tree_positions(starts, seq_lens, tree)
    return BatchMetadata(
        block_tables=pool.block_tables,
        seq_lens=seq_lens,
        query_start_loc=starts,
        slot_mapping=slots,
        positions=jnp.maximum(at, 0),
        block_size=pool.block_size,
        max_query_len=max_query_len,
        tree=tree,
    )

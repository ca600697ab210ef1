"""Moving sequences between two pools, such as a device's and the host's."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Integer

from .._arrays.devices import on_one_device
from .._arrays.namespace import cdiv, in_range, set_at
from . import checks as validate
from .block_pool import BlockPool, given_back
from .growth import append_tokens
from .releasing import release


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Swap:
    """What a swap did for each sequence.

    Fields:
      ok: whether the sequence has moved; if not, it is where it was.
      src, dst: the blocks to copy, -1 for none. Before anything else is written, call
        `swap_blocks(src_cache, dst_cache, swap.src, swap.dst)` for the caches of every layer.
    """

    ok: Bool[Array, "num_swaps"]
    src: Int[Array, "num_copies"]
    dst: Int[Array, "num_copies"]


@on_one_device
def swap_out(
    pool: BlockPool, host_pool: BlockPool, seqs: Integer[Any, "n"], host_seqs: Integer[Any, "n"]
) -> tuple[BlockPool, BlockPool, Swap]:
    """Moves rows `seqs` of a pool to unused rows `host_seqs` of another; -1 is skipped.

    A sequence that shares blocks takes copies of them along. It stays where it is if the row is
    in use, or if the blocks do not suffice: rows are served in order, as in `append_tokens`.

    Returns:
      both pools, and a `Swap`: which sequences have moved, and which blocks to copy.

    Raises:
      InvalidInputError: arrays of wrong shapes, pools of different block sizes; outside jit also
        rows that a pool does not have.

    >>> from pagedattn import init_block_pool
    >>> host = init_block_pool(9, 4, max_seqs=3, max_blocks=2)
    >>> pool, _ = append_tokens(init_block_pool(4, 4, max_seqs=2, max_blocks=2), jnp.array([5, 0]))
    >>> pool, host, swap = swap_out(pool, host, jnp.array([0]), jnp.array([2]))
    >>> int(pool.num_free), host.seq_lens.tolist(), swap.ok.tolist()
    (4, [0, 0, 5], [True])
    """
    return _move(*validate.swap(pool, host_pool, seqs, host_seqs))


@on_one_device
def swap_in(
    pool: BlockPool, host_pool: BlockPool, host_seqs: Integer[Any, "n"], seqs: Integer[Any, "n"]
) -> tuple[BlockPool, BlockPool, Swap]:
    """Moves rows `host_seqs` of the host's pool to unused rows `seqs` of a pool: `swap_out` undone.

    Copy the blocks with `swap_blocks(host_cache, cache, swap.src, swap.dst)`.

    Returns, Raises: as `swap_out`.

    >>> from pagedattn import init_block_pool
    >>> host = init_block_pool(9, 4, max_seqs=3, max_blocks=2)
    >>> pool, _ = append_tokens(init_block_pool(4, 4, max_seqs=2, max_blocks=2), jnp.array([5, 0]))
    >>> pool, host, _ = swap_out(pool, host, jnp.array([0]), jnp.array([2]))
    >>> pool, host, swap = swap_in(pool, host, jnp.array([2]), jnp.array([1]))
    >>> pool.seq_lens.tolist(), host.seq_lens.tolist(), swap.ok.tolist()
    ([0, 5], [0, 0, 0], [True])
    """
    pool, host_pool, seqs, host_seqs = validate.swap(pool, host_pool, seqs, host_seqs)
    host_pool, pool, swap = _move(host_pool, pool, host_seqs, seqs)
    return pool, host_pool, swap


def _move(source, target, seqs, rows):
    before = jnp.tri(len(seqs), k=-1, dtype=bool)
    same = (seqs[:, None] == seqs[None]) | (rows[:, None] == rows[None])
    known = in_range(seqs, source.max_seqs) & in_range(rows, target.max_seqs)
    known &= ~(same & before & known[None]).any(axis=1)
    known &= target.seq_lens.at[rows].get(mode="clip") == 0
    target, ok = _make_room(source, target, seqs, jnp.where(known, rows, -1))
    src = _owned_blocks(source, jnp.where(ok, seqs, -1))
    dst = _owned_blocks(target, jnp.where(ok, rows, -1))
    most = min(src.shape[1], dst.shape[1])  # further columns of the wider one hold -1 alone
    source, _ = release(source, jnp.where(ok, seqs, -1))
    return source, target, Swap(ok, src[:, :most].ravel(), dst[:, :most].ravel())


def _make_room(source, target, seqs, rows):
    """Makes unused rows (-1: none) of the target as long as rows of the source; and for which.

    What the source gave back behind a window is missing in the target too, and takes no blocks:
    these rows begin as long as that, and without any block.
    """
    lens = source.seq_lens.at[seqs].get(mode="clip")
    used = jnp.arange(source.max_blocks)[None] < cdiv(lens, source.block_size)[:, None]
    gone = used & given_back(source.block_tables.at[seqs].get(mode="clip"))
    missing = gone.sum(axis=1, dtype=jnp.int32) * source.block_size
    tables, before = set_at(target.block_tables, rows, -1), target.seq_lens
    target = replace(target, block_tables=tables, seq_lens=set_at(before, rows, missing))
    wanted = set_at(jnp.zeros_like(before), rows, lens - missing)
    target, growth = append_tokens(target, wanted)
    target = replace(target, seq_lens=jnp.where(growth.ok, target.seq_lens, before))
    return target, (rows >= 0) & growth.ok.at[rows].get(mode="clip")


def _owned_blocks(pool, rows):
    """The blocks of rows, -1 past their ends and in row -1."""
    used = jnp.arange(pool.max_blocks)[None] < pool.seq_blocks.at[rows].get(mode="clip")[:, None]
    return jnp.where(used & (rows >= 0)[:, None], pool.block_tables.at[rows].get(mode="clip"), -1)

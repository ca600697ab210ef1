"""Growing sequences in a block pool, with copy-on-write."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Integer

from .._arrays.checks import an_array
from .._arrays.devices import on_one_device
from .._arrays.inspect import known
from .._arrays.namespace import add_at, cdiv
from ..errors import InvalidInputError, OutOfBlocksError
from . import checks as validate
from .block_pool import BlockPool


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Growth:
    """What `append_tokens`, or `next_batch`, did for each sequence.

    Fields:
      ok: whether the sequence has grown; if not, it is as it was.
      copy_src, copy_dst: the block to copy before writing, in every layer's cache:
        `copy_blocks(cache, growth.copy_src, growth.copy_dst)`; -1 for none.
    """

    ok: Bool[Array, "max_seqs"]
    copy_src: Int[Array, "max_seqs"]
    copy_dst: Int[Array, "max_seqs"]

    def require(self) -> None:
        """Outside jit: raises OutOfBlocksError if a sequence has not grown."""
        an_array("Growth.ok", self.ok)
        ok = known(self.ok)
        if ok is None or ok.dtype != bool:
            raise InvalidInputError(
                "Growth.require reads ok, which must be bool and is known only outside jit: return "
                "the Growth from the jitted function, and call require on that"
            )
        failed = np.flatnonzero(~ok).tolist()
        if failed:
            raise OutOfBlocksError(
                f"no blocks for the new tokens of sequences {failed}; release or swap out others, "
                "or make the pool or its tables larger"
            )


@on_one_device
def append_tokens(
    pool: BlockPool, num_tokens: Integer[Any, "max_seqs"], *, max_new_tokens: int | None = None
) -> tuple[BlockPool, Growth]:
    """Makes room for `num_tokens[s]` new tokens of each sequence; 0 leaves a sequence alone.

    Gives each sequence the blocks that it lacks, and a block of its own in place of a shared one
    that its tokens would be written to. Rows are served in order. If too few blocks are free for
    one of them, it and all later rows that need a block stay as they were. A sequence that would
    not fit its table row stays as it was too.

    Write and attend to the tokens of sequences that grow, and no others: `next_batch` does this,
    and makes such a batch.

    Args:
      max_new_tokens: a static bound on `num_tokens`, None for what a table row holds. The work is
        O(max_seqs * (max_seqs + blocks of that bound)), whatever the pool's size.

    Returns:
      the pool, and a `Growth`: which sequences have grown, and which blocks to copy.

    Raises:
      InvalidInputError: arrays of wrong shapes; outside jit also negative numbers of tokens.

    >>> from pagedattn import init_block_pool
    >>> pool = init_block_pool(3, 4, max_seqs=2, max_blocks=2)
    >>> pool, growth = append_tokens(pool, jnp.array([5, 8]))
    >>> growth.ok.tolist(), pool.seq_lens.tolist(), int(pool.num_free)
    ([True, False], [5, 0], 1)
    """
    pool = validate.pool(pool)
    new, max_new_tokens = validate.growth(num_tokens, pool.max_seqs, max_new_tokens)
    capacity = pool.max_blocks * pool.block_size
    bound = capacity if max_new_tokens is None else min(max_new_tokens, capacity)
    fits = (new >= 0) & (new <= bound) & (new <= capacity - pool.seq_lens)
    new = jnp.where(fits, new, 0)
    copies, sharers = _writes_to_shared(pool, new > 0)
    first_column = pool.seq_blocks - copies.astype(jnp.int32)
    need = jnp.where(new > 0, cdiv(pool.seq_lens + new, pool.block_size) - first_column, 0)
    ok = fits & ((need == 0) | (jnp.cumsum(need, dtype=jnp.int32) <= pool.num_free))
    # The last sharer keeps the block only because all before it copy theirs. If one of them fails,
    # the block is still shared, so the last one fails too.
    ok = ok & (copies | ~(sharers & ~ok[None]).any(axis=1))
    grown = _allocate(pool, jnp.where(ok, need, 0), first_column, cdiv(bound, pool.block_size) + 1)
    copies = copies & ok
    source = jnp.where(copies, _last_blocks(pool), -1)
    target = jnp.where(copies, _last_blocks(pool, grown.block_tables), -1)
    ref_counts = add_at(grown.ref_counts, source, -1)
    seq_lens = pool.seq_lens + jnp.where(ok, new, 0)
    grown = replace(grown, ref_counts=ref_counts, seq_lens=seq_lens)
    return grown, Growth(ok, source, target)


def _writes_to_shared(pool, writes):
    """Which sequences must copy their last block, and which earlier rows write to the same block.

    bool `[max_seqs]` and `[max_seqs, max_seqs]`. A sequence that writes to a shared block copies
    it. The one exception: where all owners write, the last of them keeps the block, since the
    others have left it by then.
    """
    partial = writes & (pool.seq_lens % pool.block_size != 0)
    last = _last_blocks(pool)
    owners = jnp.where(partial, pool.ref_counts[last], 0)
    same = (last[:, None] == last[None]) & partial[:, None] & partial[None]
    sharers = same & (owners > 1)[None] & jnp.tri(len(last), k=-1, dtype=bool)
    return (owners > 1) & (sharers.sum(axis=1, dtype=jnp.int32) < owners - 1), sharers


def _last_blocks(pool, block_tables=None):
    """The block of each sequence's last token; for an empty sequence an arbitrary one."""
    tables = pool.block_tables if block_tables is None else block_tables
    columns = jnp.maximum(pool.seq_blocks - 1, 0)
    return tables[jnp.arange(pool.max_seqs), columns]


def _allocate(pool, need, first_column, most):
    """Puts `need[s]` free blocks, at most `most`, into row s from column `first_column[s]` on."""
    offsets = jnp.arange(most, dtype=jnp.int32)[None]
    wanted = offsets < need[:, None]
    depth = (jnp.cumsum(need, dtype=jnp.int32) - need)[:, None] + offsets
    blocks = pool.free_blocks.at[pool.num_free - 1 - depth].get(mode="clip")
    blocks = jnp.where(wanted, blocks, -1)
    columns = jnp.where(wanted, first_column[:, None] + offsets, pool.max_blocks)
    rows = jnp.arange(pool.max_seqs)[:, None]
    return replace(
        pool,
        block_tables=pool.block_tables.at[rows, columns].set(blocks, mode="drop"),
        ref_counts=add_at(pool.ref_counts, blocks, 1),
        num_free=pool.num_free - need.sum(dtype=jnp.int32),
    )

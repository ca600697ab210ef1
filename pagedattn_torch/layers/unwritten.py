"""Prefills with a context some of whose new tokens are not written to the cache.

Engines give slot -1 to tokens that are behind the window when their step is done. Later tokens of
the same step see them nevertheless. So such prefills do not read their new keys from the cache:
they attend to the last keys of their contexts, copied from it, and then to their new ones, as they
are given.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from pagedattn import BatchMetadata, KVCache
from pagedattn._arrays.inspect import known
from pagedattn._arrays.namespace import arange
from pagedattn.batch.indices import sequence_ids, token_positions

from ..arrays import bits


class Contexts(NamedTuple):
    """Where in a cache keys of contexts are, for each sequence as many as the longest needs."""

    blocks: Int[Tensor, "num_keys"]
    offsets: Int[Tensor, "num_keys"]

    def before(self, packed: KVCache, cache: KVCache) -> KVCache:
        """A cache of blocks of one token: these keys of `cache`, copied, and then `packed`."""
        joined = {}
        for name, array in cache.by_slot.items():
            old = bits(array)[self.blocks, self.offsets][:, None]
            joined[name] = torch.cat([old, bits(getattr(packed, name))]).view(array.dtype)
        return replace(packed, **joined)


def reach(batch: BatchMetadata, num_prefills: int, window: int | None) -> int | None:
    """How many keys of their contexts prefills with unwritten tokens may see; None without such.

    Where values are not read, that is judged by shapes: engines leave out tokens only if a layer
    has a window, and it is shorter than a query.
    """
    slots, starts, contexts = map(known, (batch.slot_mapping, batch.query_start_loc,
                                          batch.context_lens))  # fmt: skip
    if slots is None or starts is None or contexts is None:
        if not num_prefills or window is None or batch.max_query_len <= window:
            return None
        return min(window - 1, batch.max_blocks * batch.block_size)
    seqs = sequence_ids(starts, batch.num_tokens)
    if not ((slots < 0) & (seqs >= 0) & (seqs < num_prefills) & (contexts[seqs] > 0)).any():
        return None
    longest = int(contexts[:num_prefills].max())
    return longest if window is None else min(window - 1, longest)


def with_contexts(
    batch: BatchMetadata, num_prefills: int, num_tokens: int, reach: int, num_blocks: int
) -> tuple[BatchMetadata, Contexts]:
    """The batch of the prefills over `Contexts.before` the keys of their `num_tokens` tokens.

    Args:
      reach: how many keys of its context a sequence may see; those before are left out.

    >>> batch = BatchMetadata(torch.tensor([[7, 5]]), torch.tensor([4]), torch.tensor([0, 1]),
    ...                       torch.tensor([11]), torch.tensor([3]), block_size=2, max_query_len=1)
    >>> own, contexts = with_contexts(batch, 1, 1, reach=2, num_blocks=8)
    >>> contexts.blocks.tolist(), contexts.offsets.tolist(), own.block_tables.tolist()
    ([7, 5], [1, 0], [[0, 1, 2]])
    """
    starts = batch.query_start_loc[: num_prefills + 1]
    contexts = batch.context_lens[:num_prefills, None]
    kept = contexts.clamp(0, reach)
    seq_lens = kept[:, 0] + starts.diff()
    columns = arange(reach + batch.max_query_len, starts)
    old = (arange(num_prefills, starts)[:, None] + 1) * reach - kept
    new = num_prefills * reach + starts[:-1, None] - kept
    own = BatchMetadata(
        block_tables=torch.where(columns < kept, old, new) + columns,
        seq_lens=seq_lens,
        query_start_loc=starts,
        slot_mapping=torch.full_like(arange(num_tokens, starts), -1),
        positions=token_positions(starts, seq_lens, num_tokens),
        block_size=1,
        max_query_len=batch.max_query_len,
    )
    positions = contexts - reach + arange(reach, starts)
    return own, _places(batch, positions.clamp(min=0), num_blocks)


def _places(batch, positions, num_blocks) -> Contexts:
    columns = (positions // batch.block_size).clamp(max=batch.max_blocks - 1)
    blocks = batch.block_tables[: len(positions)].gather(1, columns.long())
    return Contexts(
        blocks.clamp(0, num_blocks - 1).flatten(), (positions % batch.block_size).flatten()
    )

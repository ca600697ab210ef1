"""Attention over a prefix that all sequences share, computed once for all of them."""

from dataclasses import replace

import jax.numpy as jnp

from ._arrays.devices import on_one_device
from ._arrays.dlpack import takes_any_array
from ._arrays.int32 import INT32, int32
from ._dispatch import validate
from ._dispatch.backend import Backend
from ._dispatch.crossings import Crossings
from .attention import Lse, Query, Sinks, paged_attention
from .batch import validate as validate_batch
from .batch.indices import PAD_SLOT
from .batch.metadata import BatchMetadata, nondecreasing_starts, sequences_of
from .cache.kv_cache import KVCache
from .errors import UnsupportedError
from .merge import merge_states
from .spec import AttentionSpec


@takes_any_array
@on_one_device
def cascade_attention(
    query: Query,
    cache: KVCache,
    prefix: BatchMetadata,
    rest: BatchMetadata,
    spec: AttentionSpec = AttentionSpec(),
    *,
    backend: str | Backend | Crossings | None = None,
    sinks: Sinks | None = None,
) -> tuple[Query, Lse]:
    """`paged_attention`, which reads the blocks that all sequences begin with only once.

    For 64 sequences behind one system prompt the prompt's keys are read once instead of 64 times.
    Nothing is traced again when the number of shared blocks changes; where there are none, it
    costs one call more.

    Args:
      query, cache, spec, sinks: as in `paged_attention`.
      prefix, rest: the batch as `split_prefix` cuts it: once a step, for all layers.
      backend: runs both parts: all tokens as the queries of one sequence over the shared blocks,
        and the rest of each sequence.

    Returns:
      out and lse, as `paged_attention(..., return_lse=True)` to rounding.

    Raises:
      UnsupportedError: a window or ALiBi, with which each query sees the prefix differently.
      InvalidInputError, BackendUnavailableError: as `paged_attention`.

    >>> from pagedattn import init_kv_cache, make_batch
    >>> cache = init_kv_cache(3, 4, 1, 8, jnp.float32)
    >>> batch = make_batch([1, 1], [4, 6], [[0, 1], [0, 2]], block_size=4)
    >>> query, parts = jnp.ones((2, 2, 8)), split_prefix(batch)
    >>> out, lse = cascade_attention(query, cache, *parts, backend="xla")
    >>> out.shape, lse.shape
    ((2, 2, 8), (2, 2))
    """
    validate.attention(query, cache, rest, spec, True)
    _require_shared_view(spec)
    whole = replace(spec, causal=False)  # every query stands behind the prefix
    of_prefix = paged_attention(query, cache, prefix, whole, backend=backend, return_lse=True)
    options = {"backend": backend, "sinks": sinks}
    of_rest = paged_attention(query, cache, rest, spec, return_lse=True, **options)
    return merge_states(*of_prefix, *of_rest)


@takes_any_array
@on_one_device
def split_prefix(batch: BatchMetadata) -> tuple[BatchMetadata, BatchMetadata]:
    """Splits a batch in two: over the blocks that all its sequences share, and over the rest.

    Shared blocks are those with which all tables begin, if all their tokens come before every
    new token; sequences without new tokens are ignored. For `cascade_attention`; usable in jit.

    Returns:
      prefix: one sequence with all tokens as its queries, over the shared blocks.
      rest: the sequences without these blocks; positions count from the prefix's end.

    Raises:
      InvalidInputError: not a batch, or arrays in it that do not fit together.

    >>> from pagedattn import make_batch
    >>> batch = make_batch([1, 1], [4, 6], [[0, 1], [0, 2]], block_size=4)
    >>> prefix, rest = split_prefix(batch)
    >>> prefix.seq_lens.tolist(), rest.seq_lens.tolist(), rest.block_tables[:, 0].tolist()
    ([4], [1, 3], [1, 2])
    """
    validate_batch.shapes(batch)
    sequences = nondecreasing_starts(sequences_of(batch))
    blocks, count = _shared_blocks(sequences, batch.block_size)
    length = count * batch.block_size
    num_tokens = sequences.query_start_loc[-1:]
    positions = int32(batch.positions)
    prefix = replace(
        batch,
        block_tables=blocks[None],
        seq_lens=length[None],
        query_start_loc=jnp.concatenate([jnp.zeros_like(num_tokens), num_tokens]),
        slot_mapping=jnp.full(batch.slot_mapping.shape, PAD_SLOT, jnp.int32),
        positions=positions,
        max_query_len=max(1, batch.num_tokens),
        tree=None,
    )
    rest = replace(
        batch,
        block_tables=jnp.roll(sequences.block_tables, -count, axis=1),
        seq_lens=jnp.maximum(sequences.seq_lens - length, 0),
        query_start_loc=sequences.query_start_loc,
        slot_mapping=int32(batch.slot_mapping),
        positions=jnp.maximum(positions - length, 0),
        tree=sequences.tree,
    )
    return prefix, rest


def _shared_blocks(sequences, block_size):
    """The blocks that the sequences with new tokens begin with alike, and their number."""
    brings = sequences.query_lens > 0
    options = {"axis": 0, "where": brings[:, None]}
    highest = jnp.max(sequences.block_tables, initial=-1, **options)
    lowest = jnp.min(sequences.block_tables, initial=INT32.max, **options)
    capacity = sequences.max_blocks * block_size
    context = jnp.min(sequences.context_lens, where=brings, initial=capacity)
    columns = jnp.arange(sequences.max_blocks, dtype=jnp.int32)
    same = (highest == lowest) & (columns < context // block_size)
    return highest, jnp.cumprod(same, dtype=jnp.int32).sum(dtype=jnp.int32)


def _require_shared_view(spec):
    for name in ("sliding_window", "alibi_slopes"):
        if getattr(spec, name) is not None:
            raise UnsupportedError(
                f"cascade_attention does not have {name}: each query sees the prefix differently; "
                "use paged_attention"
            )

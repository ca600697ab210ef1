"""Values of a batch that are out of range, found inside jit too."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental import checkify
from jaxtyping import Array, Bool

from .._arrays.devices import on_one_device
from .._arrays.dlpack import takes_any_array
from .._arrays.int32 import int32, nondecreasing
from .._arrays.namespace import cdiv, in_range
from ..cache import validate_writes
from ..cache.kv_cache import KVCache
from ..cache.validate import kv_cache
from ..spec import AttentionSpec, require_spec
from . import validate as validate_batch
from .metadata import BatchMetadata


@takes_any_array
@on_one_device
def check_batch(
    batch: BatchMetadata, cache: KVCache, spec: AttentionSpec = AttentionSpec()
) -> None:
    """Finds lengths, starts, blocks and slots out of range, inside jit under `checkify`.

    Outside jit all functions check these values themselves. Inside they cannot: wrong ones neither
    read nor write outside the cache, but give unspecified results. To find them, call this in the
    step, before the write, and run the step under `jax.experimental.checkify`. Without `checkify`
    it checks nothing inside jit, and costs nothing.

    Args:
      spec: entries in the tables for blocks that its window hides may be -1.

    Raises:
      InvalidInputError: batch and cache do not fit together; or values, where they are known.

    >>> from jax.experimental import checkify
    >>> from pagedattn import init_kv_cache, make_batch
    >>> cache, batch = init_kv_cache(2, 4, 1, 8), make_batch([1], [4], [[1, 0]], block_size=4)
    >>> check = jax.jit(checkify.checkify(check_batch))
    >>> error, _ = check(batch, cache)
    >>> error.throw()  # nothing was found
    >>> error, _ = check(batch, init_kv_cache(1, 4, 1, 8))
    >>> error.get().partition(" (")[0]
    'block_tables must name blocks from 0 to 0: 1 of sequence 0'
    """
    kv_cache(cache)
    require_spec(spec)
    validate_batch.fits(batch, cache)
    validate_batch.values(batch, cache.num_blocks, spec.sliding_window)
    validate_writes.slots(batch.slot_mapping, cache.num_slots)
    if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(batch)):
        return
    checks = (*_of_starts(batch), *_of_lengths(batch), *_of_blocks(batch, cache, spec))
    for good, text, values in (*checks, *_of_slots(batch, cache)):
        checkify.debug_check(good, text, **values)


# Each check: whether all is well, the text of the error, and the values in it.
Checks = Iterator[tuple[Bool[Array, ""], str, dict[str, Array]]]


def _first(bad, *arrays):
    """The entries at the first place that is bad, and its indices."""
    at = jnp.argmax(bad.ravel())
    return [array.ravel()[at] for array in arrays], jnp.unravel_index(at, bad.shape)


def _of_starts(batch) -> Checks:
    starts, risen = int32(batch.query_start_loc), nondecreasing(batch.query_start_loc)
    later = jnp.flip(jax.lax.cummax(jnp.flip((starts != 0).astype(jnp.int32))))  # any but padding
    falls = (starts < risen) & (later > 0)
    text = "query_start_loc must rise from 0 to at most {count}: it has {start} at {at}"
    count = jnp.int32(batch.num_tokens)
    bad = falls | (risen > count) | (starts < 0) | ((starts != 0) & (jnp.arange(len(starts)) == 0))
    (start,), (at,) = _first(bad, starts)
    yield ~bad.any(), text, {"count": count, "start": start, "at": at}
    spans = jnp.diff(risen, prepend=risen[:1])
    (span,), (at,) = _first(spans > batch.max_query_len, spans)
    most = jnp.int32(batch.max_query_len)
    text = "no span of query_start_loc may exceed max_query_len = {most}: {span} before entry {at}"
    yield (spans <= most).all(), text, {"most": most, "span": span, "at": at}


def _of_lengths(batch) -> Checks:
    if not batch.num_seqs:
        return
    lens, capacity = int32(batch.seq_lens), batch.max_blocks * batch.block_size
    bad = (lens < 0) | (lens > capacity)
    (length,), (seq,) = _first(bad, lens)
    text = "seq_lens must be from 0 to the {capacity} that a row holds: {length} of sequence {seq}"
    yield ~bad.any(), text, {"capacity": jnp.int32(capacity), "length": length, "seq": seq}


def _of_blocks(batch, cache, spec) -> Checks:
    """Of those that the call may see."""
    if not batch.num_seqs or not batch.max_blocks:
        return
    lens, starts, table = map(int32, (batch.seq_lens, batch.query_start_loc, batch.block_tables))
    first = validate_batch.first_columns(batch.block_size, lens, starts, spec.sliding_window)
    columns = jnp.arange(batch.max_blocks, dtype=jnp.int32)[None]
    seen = (columns >= first[:, None]) & (columns < cdiv(lens, batch.block_size)[:, None])
    bad = seen & ~in_range(table, cache.num_blocks)
    (block,), (seq, column) = _first(bad, table)
    text = "block_tables must name blocks from 0 to {last}: {block} of sequence {seq} (entry {at})"
    last = jnp.int32(cache.num_blocks - 1)
    yield ~bad.any(), text, {"last": last, "block": block, "seq": seq, "at": column}


def _of_slots(batch, cache) -> Checks:
    if not batch.num_tokens:
        return
    slots = int32(batch.slot_mapping)
    bad = (slots != -1) & ~in_range(slots, cache.num_slots)
    (slot,), (token,) = _first(bad, slots)
    text = "slot_mapping must name slots from 0 to {last}, or -1: {slot} of token {token}"
    last = jnp.int32(cache.num_slots - 1)
    yield ~bad.any(), text, {"last": last, "slot": slot, "token": token}
    order = jnp.sort(slots)
    twice = jnp.append(order[1:] == order[:-1], False) & (order >= 0)
    (slot,), _ = _first(twice, order)
    yield ~twice.any(), "slot {slot} is written by several tokens", {"slot": slot}

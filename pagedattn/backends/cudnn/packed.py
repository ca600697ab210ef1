"""cuDNN on packed sequences: queries and outs stay where they are, nothing is padded.

For Hopper and newer. Offsets say where a sequence's rows start, lengths how many they are; rows of
the out that belong to no sequence are undefined.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..._dispatch.call import Call
from ...batch.indices import sequence_ids
from ...batch.metadata import Sequences
from ...cache.kv_cache import KVCache
from ...merge import merge_states
from .kernel import attention
from .pages import first_pages

# JAX 0.10 computes wrong offsets into the keys where several query heads share a KV head.
OLDEST_JAX = (0, 11)
# The most that lse may take: cuDNN lays out a float for every sequence, head and token.
STATISTICS_BYTES = 512 << 20


class Tokens(NamedTuple):
    """The sequence and the position of each token of the batch.

    `live` is False for padding, and for queries of cross attention that stand before all keys.
    """

    live: Bool[Array, "num_tokens"]
    seqs: Int[Array, "num_tokens"]
    positions: Int[Array, "num_tokens"]


class Spans(NamedTuple):
    """The first row of each sequence, and how many rows it has."""

    starts: Int[Array, "num_seqs"]
    lens: Int[Array, "num_seqs"]


def packs(call: Call) -> bool:
    """Whether a batch can stay packed, by its shapes."""
    size = 4 * (call.num_seqs + 1) * call.num_tokens * call.num_heads
    return jax.__version_info__ >= OLDEST_JAX and size <= STATISTICS_BYTES


def context_lens(batch: Sequences) -> Int[Array, "num_seqs"]:
    """Context lengths; 0 without queries, and where there are fewer keys than queries."""
    return jnp.where(batch.query_lens > 0, jnp.maximum(batch.context_lens, 0), 0)


def alone(call, query, cache, batch):
    """Attention of the new tokens to themselves, for batches in which no sequence has a context."""
    return on_new_tokens(call, query, cache, batch, with_lse=call.return_lse)


def joined(call, query, cache, batch):
    """Attention of the new tokens to themselves and to their contexts, merged."""
    key_lens = context_lens(batch)
    out, lse = on_new_tokens(call, query, cache, batch, with_lse=True)
    pages = first_pages(call, cache, batch, key_lens)
    context = on_first_keys(call, query, batch, key_lens, pages)
    out, lse = merge_states(out, lse, *context)
    return out, lse if call.return_lse else None


def tokens_of(call: Call, batch: Sequences) -> Tokens:
    seqs = sequence_ids(batch.query_start_loc, call.num_tokens)
    known, seqs = seqs >= 0, jnp.maximum(seqs, 0)
    offsets = jnp.arange(call.num_tokens, dtype=jnp.int32) - batch.query_start_loc[seqs]
    positions = batch.context_lens[seqs] + offsets
    return Tokens(known & (positions >= 0), seqs, positions)


def query_spans(call: Call, batch: Sequences) -> Spans:
    """The queries of each sequence, without those that stand before all keys."""
    early = jnp.maximum(-batch.context_lens, 0)
    lens = jnp.maximum(batch.query_lens - early, 0)
    return Spans(jnp.minimum(batch.query_start_loc[:-1] + early, call.num_tokens), lens)


def on_new_tokens(
    call: Call,
    query: Float[Array, "num_tokens num_heads head_dim"],
    cache: KVCache,
    batch: Sequences,
    *,
    with_lse: bool,
) -> tuple[Float[Array, "num_tokens num_heads head_dim"], Any]:
    """out and lse of every token over the new tokens of its sequence, up to itself."""
    tokens, spans = tokens_of(call, batch), query_spans(call, batch)
    columns = jnp.clip(tokens.positions // call.block_size, 0, call.max_blocks - 1)
    at = batch.block_tables[tokens.seqs, columns], tokens.positions % call.block_size
    live = tokens.live[:, None, None]  # zeros elsewhere: a NaN would survive a weight of 0
    key, value = (
        jnp.where(live, plane.at[at].get(mode="clip", wrap_negative_indices=False), 0)
        for plane in cache.planes
    )
    options = {"causal": True, "scale": call.scale, "with_lse": with_lse}
    return _state(query, key, value, (spans, spans), tokens, **options)


def on_first_keys(
    call: Call,
    query: Float[Array, "num_tokens num_heads head_dim"],
    batch: Sequences,
    key_lens: Int[Array, "num_seqs"],
    pages: tuple[Float[Array, "num_seqs capacity num_kv_heads head_dim"], ...],
) -> tuple[Float[Array, "num_tokens num_heads head_dim"], Any]:
    """out and lse of every token over all of the first `key_lens` keys of its sequence."""
    key, value = (plane.reshape(-1, *plane.shape[2:]) for plane in pages)
    keys = Spans(jnp.arange(call.num_seqs, dtype=jnp.int32) * call.capacity, key_lens)
    tokens = tokens_of(call, batch)
    tokens = tokens._replace(live=tokens.live & (key_lens[tokens.seqs] > 0))
    spans = query_spans(call, batch), keys
    return _state(query, key, value, spans, tokens, causal=False, scale=call.scale)


def _state(
    query: Float[Array, "num_tokens num_heads head_dim"],
    key: Float[Array, "num_keys num_kv_heads head_dim"],
    value: Float[Array, "num_keys num_kv_heads head_dim"],
    spans: tuple[Spans, Spans],
    tokens: Tokens,
    *,
    with_lse: bool = True,
    **options,
) -> tuple[Float[Array, "num_tokens num_heads head_dim"], Any]:
    """cuDNN's results, 0 and -inf for tokens that are not live."""
    closed = (_closed(part, len(rows)) for part, rows in zip(spans, (query, key), strict=True))
    out, lse = kernel(query, key, value, *closed, with_lse=with_lse, **options)
    live = tokens.live[:, None]
    out = jnp.where(live[..., None], out, 0)
    if not with_lse:
        return out, None
    rows = jnp.arange(len(query), dtype=jnp.int32) - spans[0].starts[tokens.seqs]
    lse = lse.at[tokens.seqs, :, rows].get(mode="clip", wrap_negative_indices=False)
    return out, jnp.where(live, lse, -jnp.inf)


def _closed(spans: Spans, num_rows: int) -> Spans:
    """The spans, clipped to the rows that exist, and one empty sequence more.

    cuDNN would follow wrong spans out of the arrays, and takes a single sequence for a rectangle.
    """
    starts = jnp.clip(spans.starts, 0, num_rows)
    lens = jnp.clip(spans.lens, 0, num_rows - starts)
    return Spans(*(jnp.append(part, jnp.zeros(1, part.dtype)) for part in (starts, lens)))


def kernel(
    query: Float[Array, "num_tokens num_heads head_dim"],
    key: Float[Array, "num_keys num_kv_heads head_dim"],
    value: Float[Array, "num_keys num_kv_heads head_dim"],
    queries: Spans,
    keys: Spans,
    *,
    causal: bool,
    scale: float,
    with_lse: bool,
) -> tuple[Float[Array, "num_tokens num_heads head_dim"], Any]:
    """out `[num_tokens, heads, dim]`, and lse `[num_seqs, heads, rows of the sequence, padded]`."""
    starts = (jnp.append(spans.starts, jnp.zeros(1, jnp.int32)) for spans in (queries, keys))
    query_starts, key_starts = (part[None] for part in starts)
    lens = {
        "q_seqlen": queries.lens[None],
        "kv_seqlen": keys.lens[None],
        "q_offsets": query_starts,
        "kv_offsets": key_starts,
    }
    out, lse = attention(
        query[None],
        key[None],
        value[None],
        lens,
        mask="PADDING_CAUSAL" if causal else "PADDING",
        with_lse=with_lse,
        scale=scale,
    )
    return out[0], lse

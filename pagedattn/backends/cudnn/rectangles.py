"""cuDNN on rectangles: one row of queries and one row of keys for each sequence.

cuDNN aligns a causal mask with the first key. So new tokens after a context take two calls, one
over the context and one over the new tokens themselves, joined by their log-sum-exps. With a
sliding window one call does: both rectangles begin with the end of the context, as far back as the
window reaches, and the results of those rows are dropped.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..._arrays.namespace import cdiv
from ..._dispatch.call import Call
from ...batch.indices import sequence_ids
from ...batch.metadata import Sequences
from ...cache.kv_cache import KVCache
from ...merge import merge_states
from .kernel import attention
from .pages import first_pages, pages_of


class Rows(NamedTuple):
    """The rows of the rectangle of new tokens: `[num_seqs, rows]`, or one number a sequence.

    Row r of a sequence holds its query number `r - shift` and its key at position `first_key + r`.
    Rows before `shift` are context that a window reaches; rows from `count` on are padding.
    """

    count: Int[Array, "num_seqs"]
    shift: Int[Array, "num_seqs"]
    first_key: Int[Array, "num_seqs"]


def alone(call, query, cache, batch):
    """Attention of the new tokens to themselves, and to the context that a window reaches."""
    rows = _causal_rows(batch, reach(call))
    _, out, lse = _on_new_tokens(call, query, cache, batch, rows)
    out, lse = _unpack(call, out, lse, batch, rows)
    return out, lse if call.return_lse else None


def joined(call, query, cache, batch):
    """Attention of the new tokens to themselves and to their contexts, merged."""
    rows = _causal_rows(batch, 0)
    rectangle, out, lse = _on_new_tokens(call, query, cache, batch, rows)
    lens = (rows.count, jnp.maximum(batch.context_lens, 0))
    context = _on_first_keys(call, rectangle, cache, batch, lens)
    out, lse = _unpack(call, *merge_states(out, lse, *context), batch, rows)
    return out, lse if call.return_lse else None


def bidirectional(call, query, cache, batch):
    none = jnp.zeros_like(batch.seq_lens)
    rows = Rows(jnp.where(batch.seq_lens > 0, batch.query_lens, 0), shift=none, first_key=none)
    rectangle = _rectangle(query, batch, rows, call.longest_query)
    state = _on_first_keys(call, rectangle, cache, batch, (rows.count, batch.seq_lens))
    out, lse = _unpack(call, *state, batch, rows)
    return out, lse if call.return_lse else None


def may_be_full(call) -> bool:
    """Whether the shapes allow that every sequence is a whole prompt of the longest length."""
    longest = call.longest_query
    return longest <= call.capacity and call.num_tokens == call.num_seqs * longest


def full(call, query, cache, batch):
    """Prompts of one length fill the rectangle: nothing to pad, to hide or to merge."""
    rows = call.longest_query
    tables = batch.block_tables[:, : cdiv(rows, call.block_size)]
    key, value = (pages_of(plane, tables)[:, :rows] for plane in cache.planes)
    rectangle = query.reshape(call.num_seqs, rows, *query.shape[1:])
    out, lse = _kernel(call, rectangle, key, value, None, with_lse=call.return_lse)
    return out.reshape(call.out_shape), None if lse is None else lse.reshape(call.lse_shape)


def reach(call) -> int:
    """How many context tokens a window shows to the first new token; 0 without a window."""
    return (call.window or 1) - 1


def _on_new_tokens(
    call, query, cache, batch, rows
) -> tuple[
    Float[Array, "num_seqs width num_heads head_dim"],
    Float[Array, "num_seqs width num_heads head_dim"],
    Float[Array, "num_seqs width num_heads"],
]:
    width = call.longest_query + reach(call)
    rectangle = _rectangle(query, batch, rows, width)
    key, value = (_new_tokens(call, plane, batch, rows, width) for plane in cache.planes)
    return rectangle, *_kernel(call, rectangle, key, value, (rows.count, rows.count))


def _on_first_keys(
    call: Call,
    rectangle: Float[Array, "num_seqs width num_heads head_dim"],
    cache: KVCache,
    batch: Sequences,
    lens: tuple[Int[Array, "num_seqs"], Int[Array, "num_seqs"]],
) -> tuple[
    Float[Array, "num_seqs width num_heads head_dim"], Float[Array, "num_seqs width num_heads"]
]:
    """out and lse of every row over the first keys of its sequence; `lens` of rows and of keys."""
    key, value = first_pages(call, cache, batch, lens[1])
    out, lse = _kernel(call, rectangle, key, value, lens, causal=False)
    return out, jnp.where(lens[1][:, None, None] > 0, lse, -jnp.inf)  # cuDNN's is undefined there


def _causal_rows(batch: Sequences, reach: int) -> Rows:
    """The rows: up to `reach` tokens of context, then new tokens, but for those before all keys."""
    context_lens = jnp.maximum(batch.context_lens, 0)
    lead = jnp.minimum(context_lens, reach)
    early = jnp.maximum(-batch.context_lens, 0)
    new = batch.query_lens - early
    return Rows(jnp.where(new > 0, lead + new, 0), lead - early, context_lens - lead)


def _rectangle(
    query: Float[Array, "num_tokens num_heads head_dim"], batch: Sequences, rows: Rows, width: int
) -> Float[Array, "num_seqs {width} num_heads head_dim"]:
    """Queries `[num_seqs, width, num_heads, head_dim]`; rows without a query hold another one's."""
    offsets = jnp.arange(width, dtype=jnp.int32) - rows.shift[:, None]
    tokens = batch.query_start_loc[:-1, None] + offsets
    return query.at[tokens].get(mode="clip", wrap_negative_indices=False)


def _new_tokens(
    call: Call,
    plane: Float[Array, "num_blocks block_size num_kv_heads head_dim"],
    batch: Sequences,
    rows: Rows,
    width: int,
) -> Float[Array, "num_seqs {width} num_kv_heads head_dim"]:
    """The key (or value) of each row; 0 in padding, where a NaN would survive a weight of 0."""
    offsets = jnp.arange(width, dtype=jnp.int32)
    positions = rows.first_key[:, None] + offsets
    columns = jnp.clip(positions // call.block_size, 0, call.max_blocks - 1)
    blocks = jnp.take_along_axis(batch.block_tables, columns, axis=1)
    picked = plane.at[blocks, positions % call.block_size].get(
        mode="clip", wrap_negative_indices=False
    )
    return jnp.where((offsets < rows.count[:, None])[:, :, None, None], picked, 0)


def _unpack(
    call: Call,
    out: Float[Array, "num_seqs width num_heads head_dim"],
    lse: Float[Array, "num_seqs width num_heads"],
    batch: Sequences,
    rows: Rows,
) -> tuple[Float[Array, "num_tokens num_heads head_dim"], Float[Array, "num_tokens num_heads"]]:
    """Results of the rectangle by token; 0 and -inf for tokens that have no row in it."""
    seqs = sequence_ids(batch.query_start_loc, call.num_tokens)
    known, seqs = seqs >= 0, jnp.maximum(seqs, 0)
    offsets = jnp.arange(call.num_tokens, dtype=jnp.int32) - batch.query_start_loc[seqs]
    at = offsets + rows.shift[seqs]
    live = known & (at >= 0) & (at < rows.count[seqs])
    out, lse = (part.at[seqs, at].get(mode="clip") for part in (out, lse))
    return jnp.where(live[:, None, None], out, 0), jnp.where(live[:, None], lse, -jnp.inf)


def _kernel(
    call: Call,
    query: Float[Array, "num_seqs rows num_heads head_dim"],
    key: Float[Array, "num_seqs keys num_kv_heads head_dim"],
    value: Float[Array, "num_seqs keys num_kv_heads head_dim"],
    lens: tuple[Int[Array, "num_seqs"], Int[Array, "num_seqs"]] | None,
    *,
    causal: bool = True,
    with_lse: bool = True,
) -> tuple[Float[Array, "num_seqs rows num_heads head_dim"], Any]:
    """cuDNN on rectangles; `lens` of queries and keys, None if all rows are filled."""
    kind = ("CAUSAL" if lens is None else "PADDING_CAUSAL") if causal else "PADDING"
    clipped = {}  # cuDNN would follow wrong ones out of the rectangles
    if lens is not None:
        clipped["q_seqlen"] = jnp.clip(lens[0], 0, query.shape[1])
        clipped["kv_seqlen"] = jnp.clip(lens[1], 0, key.shape[1])
    out, lse = attention(
        query,
        key,
        value,
        clipped,
        mask=kind,
        with_lse=with_lse,
        scale=call.scale,
        sliding_window_length=call.window if causal else None,
    )
    return out, None if lse is None else lse.swapaxes(1, 2)

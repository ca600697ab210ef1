"""Paged attention by cuDNN's fused kernels, for long queries on NVIDIA GPUs: native in XLA.

The pages are gathered (2 % of a long prefill's time) and given to cuDNN packed (`packed`), or as
rectangles: one row of queries and one row of keys for each sequence.

cuDNN aligns a causal mask with the first key. So new tokens after a context take two calls, one
over the context and one over the new tokens themselves, joined by their log-sum-exps. With a
sliding window one call does: both rectangles begin with the end of the context, as far back as the
window reaches, and the results of those rows are dropped.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...backend import Backend
from ...batch import Sequences
from ...cache import KVCache
from ...call import Call
from ...gradient import with_xla_gradient
from ...ragged import cdiv, sequence_ids
from ...state import merge_states
from . import packed
from .kernel import attention, missing

DTYPES = ("bfloat16", "float16")
# Limits of `unfit`, measured (docs/results): beyond them the rectangles cost more than they save.
SHORTEST = 2048  # query tokens, under which reading pages in place is as fast as gathering them
LEAST_WORK = 1 << 25  # query tokens x keys, under which launching is not worth it
MOST_PADDING = 2  # rows of the rectangle for each token of the batch


class Rows(NamedTuple):
    """The rows of the rectangle of new tokens: `[num_seqs, rows]`, or one number a sequence.

    Row r of a sequence holds its query number `r - shift` and its key at position `first_key + r`.
    Rows before `shift` are context that a window reaches; rows from `count` on are padding.
    """

    count: Int[Array, "num_seqs"]
    shift: Int[Array, "num_seqs"]
    first_key: Int[Array, "num_seqs"]


HONOURS = frozenset({"scale", "causal", "sliding_window", "return_lse"})


def refusals(call: Call) -> list[str]:
    """Why cuDNN cannot honour a call.

    Soft-cap and ALiBi are not in `HONOURS`: XLA has no way to cuDNN's soft-cap, and to its ALiBi
    only one for a single family of slopes.
    """
    reasons = _missing()
    if call.dtype not in DTYPES:
        reasons.append(f"cuDNN takes {' and '.join(DTYPES)}, not {call.dtype}")
    if call.head_dim % 8 or call.head_dim > 256:
        reasons.append(f"head_dim must be a multiple of 8 up to 256, got {call.head_dim}")
    if call.spec.sliding_window is not None and not call.spec.causal:
        reasons.append("sliding_window with causal=False: cuDNN bounds a window to the left only")
    return reasons


def unfit(call: Call) -> list[str]:
    """Why another backend is likely faster, judged by shapes: the rule of `backend=None`.

    cuDNN's kernels are the fastest of all, but the keys must first be gathered, and padded to
    rectangles. So queries must be long enough to reuse a gathered key, and of like lengths: a few
    prefills among many decodes would pad every decode to the longest prefill.
    """
    reasons = []
    if call.longest_query < SHORTEST:
        reasons.append(f"short queries: max_query_len is {call.longest_query}, below {SHORTEST}")
    if call.num_tokens * call.capacity < LEAST_WORK:
        reasons.append(f"little work: {call.num_tokens} tokens")
    rows = call.num_seqs * (call.longest_query + _reach(call))
    if rows > MOST_PADDING * call.num_tokens:
        reasons.append(
            f"mixed batch or wide window: {rows} padded rows for {call.num_tokens} tokens"
        )
    return reasons


@functools.partial(jax.jit, static_argnames="call")
def run(
    call: Call,
    query: Float[Array, "num_tokens num_heads head_dim"],
    cache: KVCache,
    batch: Sequences,
) -> tuple[
    Float[Array, "num_tokens num_heads head_dim"], Float[Array, "num_tokens num_heads"] | None
]:
    if not call.spec.causal:
        return _bidirectional(call, query, cache, batch)
    packs = call.window is None and _packs(call)
    alone, joined = (_packed_alone, _packed_joined) if packs else (_alone, _joined)
    # One switch, not nested ones: a branch that only passes its arguments on copies them.
    ways, way = [alone], jnp.int32(0)
    if call.window is None:
        ways.append(joined)
        way = jnp.any(_context_lens(batch) > 0).astype(jnp.int32)
    if _may_be_full(call):
        full = jnp.all(batch.query_lens == call.longest_query) & jnp.all(batch.context_lens == 0)
        way = jnp.where(full, len(ways), way)
        ways.append(_full)
    ways = [functools.partial(way, call) for way in ways]
    return jax.lax.switch(way, ways, query, cache, batch)


BACKEND = Backend("cudnn", HONOURS, with_xla_gradient(run), refusals, unfit)


def _missing() -> list[str]:
    if _capability() < (8, 0):
        return [f"cuDNN's kernels need compute capability 8.0, this GPU has {_capability()}"]
    return missing()


@functools.cache
def _capability() -> tuple[int, ...]:
    """The lowest compute capability of the GPUs."""
    versions = (str(device.compute_capability).split(".") for device in jax.devices("gpu"))
    return min(tuple(map(int, version)) for version in versions)


def _reach(call) -> int:
    """How many context tokens a window shows to the first new token; 0 without a window."""
    return (call.window or 1) - 1


def _may_be_full(call) -> bool:
    """Whether the shapes allow that every sequence is a whole prompt of the longest length."""
    longest = call.longest_query
    return longest <= call.capacity and call.num_tokens == call.num_seqs * longest


def _full(call, query, cache, batch):
    """Prompts of one length fill the rectangle: nothing to pad, to hide or to merge."""
    rows = call.longest_query
    tables = batch.block_tables[:, : cdiv(rows, call.block_size)]
    key, value = (_pages(plane, tables)[:, :rows] for plane in cache.planes)
    rectangle = query.reshape(call.num_seqs, rows, *query.shape[1:])
    out, lse = _kernel(call, rectangle, key, value, None, with_lse=call.return_lse)
    return out.reshape(call.out_shape), None if lse is None else lse.reshape(call.lse_shape)


def _packs(call) -> bool:
    return packed.packs(call) and _capability() >= (9, 0)


def _context_lens(batch: Sequences) -> Int[Array, "num_seqs"]:
    """Context lengths; 0 without queries, and where there are fewer keys than queries."""
    return jnp.where(batch.query_lens > 0, jnp.maximum(batch.context_lens, 0), 0)


def _packed_alone(call, query, cache, batch):
    """Attention of the new tokens to themselves, for batches in which no sequence has a context."""
    return packed.on_new_tokens(call, query, cache, batch, with_lse=call.return_lse)


def _packed_joined(call, query, cache, batch):
    """Attention of the new tokens to themselves and to their contexts, merged."""
    key_lens = _context_lens(batch)
    out, lse = packed.on_new_tokens(call, query, cache, batch, with_lse=True)
    pages = _first_pages(call, cache, batch, key_lens)
    context = packed.on_first_keys(call, query, batch, key_lens, pages)
    out, lse = merge_states(out, lse, *context)
    return out, lse if call.return_lse else None


def _alone(call, query, cache, batch):
    """`_packed_alone` by rectangles; they include the context that a sliding window reaches."""
    rows = _causal_rows(batch, _reach(call))
    _, out, lse = _on_new_tokens(call, query, cache, batch, rows)
    out, lse = _unpack(call, out, lse, batch, rows)
    return out, lse if call.return_lse else None


def _joined(call, query, cache, batch):
    """`_packed_joined` by rectangles."""
    rows = _causal_rows(batch, 0)
    rectangle, out, lse = _on_new_tokens(call, query, cache, batch, rows)
    lens = (rows.count, jnp.maximum(batch.context_lens, 0))
    context = _on_first_keys(call, rectangle, cache, batch, lens)
    out, lse = _unpack(call, *merge_states(out, lse, *context), batch, rows)
    return out, lse if call.return_lse else None


def _on_new_tokens(
    call, query, cache, batch, rows
) -> tuple[
    Float[Array, "num_seqs width num_heads head_dim"],
    Float[Array, "num_seqs width num_heads head_dim"],
    Float[Array, "num_seqs width num_heads"],
]:
    width = call.longest_query + _reach(call)
    rectangle = _rectangle(query, batch, rows, width)
    key, value = (_new_tokens(call, plane, batch, rows, width) for plane in cache.planes)
    return rectangle, *_kernel(call, rectangle, key, value, (rows.count, rows.count))


def _bidirectional(call, query, cache, batch):
    none = jnp.zeros_like(batch.seq_lens)
    rows = Rows(jnp.where(batch.seq_lens > 0, batch.query_lens, 0), shift=none, first_key=none)
    rectangle = _rectangle(query, batch, rows, call.longest_query)
    state = _on_first_keys(call, rectangle, cache, batch, (rows.count, batch.seq_lens))
    out, lse = _unpack(call, *state, batch, rows)
    return out, lse if call.return_lse else None


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
    key, value = _first_pages(call, cache, batch, lens[1])
    out, lse = _kernel(call, rectangle, key, value, lens, causal=False)
    return out, jnp.where(lens[1][:, None, None] > 0, lse, -jnp.inf)  # cuDNN's is undefined there


def _first_pages(
    call: Call, cache: KVCache, batch: Sequences, key_lens: Int[Array, "num_seqs"]
) -> tuple[Float[Array, "num_seqs capacity num_kv_heads head_dim"], ...]:
    """Keys and values of every sequence, zeros from its key number `key_lens` on."""
    inside = (jnp.arange(call.capacity) < key_lens[:, None])[..., None, None]
    tables = batch.block_tables
    return tuple(jnp.where(inside, _pages(plane, tables), 0) for plane in cache.planes)


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


def _pages(
    plane: Float[Array, "num_blocks block_size num_kv_heads head_dim"],
    tables: Int[Array, "num_seqs max_blocks"],
) -> Float[Array, "num_seqs max_blocks*block_size num_kv_heads head_dim"]:
    """Whole blocks as dense sequences."""
    pages = plane.at[tables].get(mode="clip", wrap_negative_indices=False)
    return pages.reshape(tables.shape[0], -1, *plane.shape[2:])


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
    query_lens, key_lens = lens or (None, None)
    if lens is not None:  # clipped, since cuDNN would follow wrong ones out of the rectangles
        query_lens = jnp.clip(query_lens, 0, query.shape[1])
        key_lens = jnp.clip(key_lens, 0, key.shape[1])
    out, lse = attention(
        query,
        key,
        value,
        mask=kind,
        with_lse=with_lse,
        q_seqlen=query_lens,
        kv_seqlen=key_lens,
        scale=call.scale,
        sliding_window_length=call.window if causal else None,
    )
    return out, None if lse is None else lse.swapaxes(1, 2)

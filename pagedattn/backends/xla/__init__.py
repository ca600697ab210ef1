"""Paged attention in pure JAX: every feature, every platform, differentiable.

The packed queries are cut into tiles, each within one sequence. A step takes a few tiles (on a CPU,
one) along the keys that they may see, chunk by chunk, with an online softmax. So memory is
O(tokens x chunk), a long sequence does not pad its batch-mates, and chunks that no tile of the step
may see are skipped.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from ..._arrays.namespace import cdiv, wide_dtype
from ..._arrays.shard_map import axes_of, varying
from ..._dispatch.backend import Backend
from ..._dispatch.call import Call
from ...batch.draft_tree import key_positions
from ...batch.metadata import Sequences
from ...cache.kv_cache import KVCache
from ...cache.quantise import dequantised
from ...masks import descent_mask, distance, visible_mask
from .softmax import accumulate, finish, no_key_seen
from .tiles import Tiles, cut, first_rows, grouped, rows_of_tokens

TILE = 64  # most query tokens of a tile, and about as many in a step of several tiles
FEW = 4  # most query tokens of a tile that is computed as a smaller one
CHUNK = 256  # keys of a chunk
INVARIANT = 8  # query tokens of each tile where bits must not follow from the number of tokens


@functools.partial(jax.jit, static_argnames="call")
def run(
    call: Call,
    query: Float[Array, "num_tokens num_heads head_dim"],
    cache: KVCache,
    batch: Sequences,
    *,
    bias: Float[Array, "num_tokens heads max_keys"] | None = None,
    selection: Int[Array, "num_seqs kv_heads num_selected"] | None = None,
) -> tuple[Float[Array, "num_tokens num_heads value_dim"], Float[Array, "num_tokens num_heads"]]:
    tile = INVARIANT if call.batch_invariant else min(TILE, call.longest_query)
    tiles = cut(call, batch, tile, selection)
    # On a CPU one tile's chunk stays in the cache, and more tiles at a time gain nothing.
    step = 1 if call.device == "cpu" else TILE // tile
    depths = None if batch.tree is None else batch.tree.depths
    attend = functools.partial(_attend, call, query, cache, bias, _slopes(call, query), depths)
    if step == 1 and tile > FEW and not call.batch_invariant:
        attend = functools.partial(_by_size, attend)
    # XLA chooses the order of a product's sums by its sizes: these are the same for all calls then.
    step = step if call.batch_invariant else min(step, tiles.first_key.shape[0])
    out, lse = jax.lax.map(attend, grouped(tiles, step))
    out = out.reshape(-1, *call.out_shape[1:])
    lse = lse.reshape(-1, call.num_heads)
    rows, live = rows_of_tokens(call, batch, tile)
    out = jnp.where(live[:, None, None], out[rows], 0)
    return out, jnp.where(live[:, None], lse[rows], -jnp.inf)


SUPPORTS = frozenset(
    {"scale", "causal", "sliding_window", "logits_soft_cap", "alibi_slopes"}
    | {"cache_dtype", "token_scales", "value_dim", "bias", "selection", "parents"}
    | {"return_lse", "batch_invariant"}
)
BACKEND = Backend("xla", SUPPORTS, run)


def _by_size(attend, tiles: Tiles):
    """`attend`, of fewer rows where few are valid: decodes among prefills cost what decodes do."""

    def few(tiles):
        smaller = first_rows(tiles, FEW)
        missing = tiles.tokens.shape[1] - FEW
        return jax.tree.map(
            lambda x: jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)), attend(smaller)
        )

    return jax.lax.cond(tiles.valid[:, FEW:].any(), attend, few, tiles)


def _attend(
    call: Call,
    query: Float[Array, "num_tokens num_heads head_dim"],
    cache: KVCache,
    bias: Float[Array, "num_tokens heads max_keys"] | None,
    slopes: Float[Array, "num_heads"] | None,
    depths: Int[Array, "num_tokens"] | None,
    tiles: Tiles,
) -> tuple[Float[Array, "step tile num_heads value_dim"], Float[Array, "step tile num_heads"]]:
    """Attention of some tiles."""
    chunk = CHUNK if call.batch_invariant else min(CHUNK, call.capacity)
    num_chunks = cdiv(call.num_listed * call.block_size, chunk)
    scaled = _tile_queries(call, query, tiles) * call.scale
    rows = None if bias is None else _tile_bias(call, bias, tiles, chunk, scaled.dtype)
    first, last = tiles.first_key[:, None, None], tiles.last_key[:, None, None]

    scales = cache.key_scale, cache.value_scale  # those of tokens, or None
    arrays: Any = list(zip(cache.planes, scales, strict=False))

    def update(state, keys):
        inside = (keys >= first) & (keys < last)
        slots = _slots(tiles.tables, keys, call.block_size)
        held = jax.tree.map(lambda array: _gather(array, slots, inside), arrays)
        positions, descend = _standing(depths, tiles, keys)
        visible = visible_mask(tiles.positions[:, None], positions, call.spec) & inside[:, :, None]
        visible = visible if descend is None else visible & descend
        visible, added = (visible & tiles.valid[:, None, :, None])[:, :, None], None
        if rows is not None:
            added = jnp.where(visible, _columns(tiles, rows, keys), -jnp.inf)
            held = jax.tree.map(lambda rows: _shown(rows, added), held)
        key, *rest = (dequantised(rows, scale, scaled.dtype) for rows, scale in held)
        (value,) = rest or (key[..., : call.out_dim],)
        logits = _logits(call, scaled, key, tiles, positions, visible, slopes, added)
        return accumulate(state, logits, value)

    def visit(state, index):
        keys = _keys(call, tiles, index * chunk + jnp.arange(chunk, dtype=jnp.int32))
        needed = (keys[..., :1] < last) & (keys[..., -1:] >= first)
        return jax.lax.cond(needed.any(), update, lambda state, _: state, state, keys), None

    chunks = _varying_as(scaled, jnp.arange(num_chunks, dtype=jnp.int32))
    state, _ = jax.lax.scan(visit, no_key_seen(scaled, call.out_dim), chunks)
    return finish(state, query.dtype, tiles.tokens.shape)


def _standing(
    depths: Int[Array, "num_tokens"] | None, tiles: Tiles, keys: Int[Array, "#step heads chunk"]
) -> tuple[Int[Array, "#step heads chunk"], Bool[Array, "step heads tile chunk"] | None]:
    """The positions of keys; and of draft trees, which the rows do not see as others'."""
    if depths is None or tiles.lines is None:
        return keys, None
    starts, context_lens = tiles.lines.starts[:, None], tiles.lines.context_lens[:, None]
    positions, own = key_positions(depths, starts, context_lens, keys)
    return positions, descent_mask(tiles.lines.ancestors[:, None], own)


def _slopes(call: Call, query) -> Float[Array, "num_heads"] | None:
    slopes = call.spec.alibi_slopes
    return None if slopes is None else _varying_as(query, jnp.asarray(slopes, jnp.float32))


def _varying_as(array, constant):
    """The constant, varying over the axes of a mesh that the array varies over.

    In shard_map JAX cannot batch a cond of operands that vary over different axes.
    """
    return varying(constant, axes_of(array))


def _tile_queries(
    call: Call, query: Float[Array, "num_tokens num_heads head_dim"], tiles: Tiles
) -> Float[Array, "step kv_heads rows head_dim"]:
    """A row for each head of a KV head's group and each token."""
    step, tile = tiles.tokens.shape
    rows = query.at[tiles.tokens].get(mode="clip")
    rows = jnp.where(tiles.valid[:, :, None, None], rows, 0)
    rows = rows.astype(wide_dtype(query))
    rows = rows.reshape(step, tile, call.num_kv_heads, call.group, call.head_dim)
    return rows.transpose(0, 2, 3, 1, 4).reshape(step, call.num_kv_heads, -1, call.head_dim)


def _tile_bias(
    call: Call, bias: Float[Array, "num_tokens heads max_keys"], tiles: Tiles, chunk: int, dtype
) -> Float[Array, "step kv_heads group tile columns"]:
    """The rows of the bias of some tiles, hiding keys that it has no column for, and a chunk more.

    With one head, if it has one for all.
    """
    rows = bias.at[tiles.tokens].get(mode="clip")[..., : call.capacity].astype(dtype)
    step, tile, heads, max_keys = rows.shape
    rows = rows.reshape(step, tile, call.num_kv_heads if heads > 1 else 1, -1, max_keys)
    missing = [(0, 0)] * 4 + [(0, call.capacity + chunk - max_keys)]
    return jnp.pad(rows, missing, constant_values=-jnp.inf).transpose(0, 2, 3, 1, 4)


def _columns(
    tiles: Tiles,
    rows: Float[Array, "step kv_heads group tile columns"],
    keys: Int[Array, "step heads chunk"],
) -> Float[Array, "step kv_heads group tile chunk"]:
    """The bias of some keys."""
    if tiles.selected is None:
        return jax.lax.dynamic_slice_in_dim(rows, keys[0, 0, 0], keys.shape[2], 4)
    return jnp.take_along_axis(rows, keys[:, :, None, None], 4)


def _keys(call: Call, tiles: Tiles, index: Int[Array, "chunk"]) -> Int[Array, "step heads chunk"]:
    """The positions of some keys; those of a selection are counted in its list of blocks."""
    if tiles.selected is None:
        return index[None, None]
    listed = tiles.selected.at[..., index // call.block_size]
    blocks = listed.get(mode="fill", fill_value=-1)
    keys = blocks * call.block_size + (index % call.block_size)[None, None]
    return jnp.where(blocks < 0, call.capacity, keys)


def _slots(
    tables: Int[Array, "step max_blocks"], keys: Int[Array, "step heads chunk"], block_size: int
) -> Int[Array, "step heads chunk"]:
    step = jnp.arange(tables.shape[0])[:, None, None]
    blocks = tables.at[step, keys // block_size].get(mode="clip")
    return blocks * block_size + keys % block_size


def _gather(
    array: Shaped[Array, "num_blocks block_size kv_heads *row"],
    slots: Int[Array, "step heads chunk"],
    inside: Bool[Array, "step heads chunk"],
) -> Shaped[Array, "step kv_heads chunk *row"]:
    """Rows of a cache's plane or of its tokens' scales, 0 where no query may look.

    With heads before slots XLA:CPU need not transpose for its matrix products. The zeros are there
    because a NaN would survive a weight of 0.
    """
    flat = array.reshape(-1, *array.shape[2:])
    heads = jnp.arange(array.shape[2])[None, :, None]
    rows = flat.at[slots, heads].get(mode="clip")
    return jnp.where(_along(inside, rows), rows, 0)


def _along(mask: Bool[Array, "..."], rows: Shaped[Array, "..."]) -> Bool[Array, "..."]:
    """A mask of rows for all that is in them."""
    return mask.reshape(*mask.shape, *[1] * (rows.ndim - mask.ndim))


def _logits(
    call: Call,
    scaled: Float[Array, "step kv_heads rows head_dim"],
    key: Float[Array, "step kv_heads chunk head_dim"],
    tiles: Tiles,
    positions: Int[Array, "#step heads chunk"],
    visible: Bool[Array, "step heads one tile chunk"],
    slopes: Float[Array, "num_heads"] | None,
    added: Float[Array, "step kv_heads group tile chunk"] | None,
) -> Float[Array, "step kv_heads rows chunk"]:
    spec = call.spec
    logits = jnp.einsum("bhrd,bhkd->bhrk", scaled, key, precision="highest")
    if spec.logits_soft_cap is not None:
        logits = spec.logits_soft_cap * jnp.tanh(logits / spec.logits_soft_cap)
    step, tile = tiles.tokens.shape
    by_head = logits.reshape(step, call.num_kv_heads, call.group, tile, -1)
    if slopes is not None:
        by_head = by_head + _alibi(tiles.positions[:, None], positions, slopes, by_head.shape[1:3])
    if added is not None:
        by_head = by_head + added
    return jnp.where(visible, by_head, -jnp.inf).reshape(logits.shape)


def _alibi(
    positions: Int[Array, "step one tile"],
    keys: Int[Array, "step heads chunk"],
    slopes: Float[Array, "num_heads"],
    heads: tuple[int, ...],
) -> Float[Array, "step kv_heads group tile chunk"]:
    """`alibi_bias` for keys that may differ by KV head."""
    away = -abs(distance(positions, keys)).astype(jnp.float32)
    return away[:, :, None] * slopes.reshape(1, *heads, 1, 1)


def _shown(
    rows: Shaped[Array, "step kv_heads chunk *row"],
    added: Float[Array, "step kv_heads group tile chunk"],
) -> Shaped[Array, "step kv_heads chunk *row"]:
    """Rows of keys or values, 0 where a bias leaves none to see them: as for those outside."""
    shown = (added > -jnp.inf).any(axis=(2, 3))
    return jnp.where(_along(shown, rows), rows, 0)

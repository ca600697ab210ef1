"""Paged attention in pure JAX: every feature, every platform, differentiable.

The packed queries are cut into tiles, each within one sequence. A step takes a few tiles (on a CPU,
one) along the keys that they may see, chunk by chunk, with an online softmax. So memory is
O(tokens x chunk), a long sequence does not pad its batch-mates, and chunks that no tile of the step
may see are skipped.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from ..._arrays.namespace import cdiv, wide_dtype
from ..._arrays.shard_map import axes_of, varying
from ..._dispatch.backend import Backend
from ..._dispatch.call import Call
from ...batch.metadata import Sequences
from ...cache.kv_cache import KVCache
from ...masks import alibi_bias, visible_mask
from .softmax import accumulate, finish, no_key_seen
from .tiles import Tiles, cut, grouped, rows_of_tokens

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
) -> tuple[Float[Array, "num_tokens num_heads value_dim"], Float[Array, "num_tokens num_heads"]]:
    tile = INVARIANT if call.batch_invariant else min(TILE, call.longest_query)
    tiles = cut(call, batch, tile)
    # On a CPU one tile's chunk stays in the cache, and more tiles at a time gain nothing.
    step = 1 if call.device == "cpu" else TILE // tile
    attend = functools.partial(_attend, call, query, cache, bias, _slopes(call, query))
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
    | {"cache_dtype", "value_dim", "bias", "return_lse", "batch_invariant"}
)
BACKEND = Backend("xla", SUPPORTS, run)


def _by_size(attend, tiles: Tiles):
    """`attend`, of fewer rows where few are valid: decodes among prefills cost what decodes do."""

    def few(tiles):
        rows = (tiles.tokens, tiles.valid, tiles.positions)
        smaller = Tiles(*(array[:, :FEW] for array in rows), *tiles[3:])
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
    tiles: Tiles,
) -> tuple[Float[Array, "step tile num_heads value_dim"], Float[Array, "step tile num_heads"]]:
    """Attention of some tiles."""
    chunk = CHUNK if call.batch_invariant else min(CHUNK, call.capacity)
    num_chunks = cdiv(call.capacity, chunk)
    scaled = _tile_queries(call, query, tiles) * call.scale
    rows = None if bias is None else _tile_bias(bias, tiles, num_chunks * chunk, scaled.dtype)

    def update(state, keys):
        inside = (keys >= tiles.first_key[:, None]) & (keys < tiles.last_key[:, None])
        slots = _slots(tiles.tables, keys[0], call.block_size)
        key, *rest = (_gather(plane, slots, inside, scaled.dtype) for plane in cache.planes)
        (value,) = rest or (key[..., : call.out_dim],)
        visible = visible_mask(tiles.positions, keys, call.spec) & inside[:, None]
        visible, added = visible & tiles.valid[:, :, None], None
        if rows is not None:
            added = jax.lax.dynamic_slice_in_dim(rows, keys[0, 0], chunk, 3)
            added = jnp.where(visible[:, None], added, -jnp.inf)
            key, value = _shown(key, added), _shown(value, added)
        logits = _logits(call, scaled, key, tiles, keys, visible, slopes, added)
        return accumulate(state, logits, value)

    def visit(state, index):
        keys = (index * chunk + jnp.arange(chunk, dtype=jnp.int32))[None]
        needed = (keys[0, 0] < tiles.last_key) & (keys[0, -1] >= tiles.first_key)
        return jax.lax.cond(needed.any(), update, lambda state, _: state, state, keys), None

    chunks = _varying_as(scaled, jnp.arange(num_chunks, dtype=jnp.int32))
    state, _ = jax.lax.scan(visit, no_key_seen(scaled, call.out_dim), chunks)
    return finish(state, query.dtype, tiles.tokens.shape)


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
    bias: Float[Array, "num_tokens heads max_keys"], tiles: Tiles, num_keys: int, dtype
) -> Float[Array, "step heads tile {num_keys}"]:
    """The rows of the bias of some tiles; keys that it has no column for are hidden."""
    rows = bias.at[tiles.tokens].get(mode="clip")[..., :num_keys].astype(dtype)
    missing = [(0, 0)] * 3 + [(0, num_keys - rows.shape[3])]
    return jnp.pad(rows, missing, constant_values=-jnp.inf).swapaxes(1, 2)


def _slots(
    tables: Int[Array, "step max_blocks"], keys: Int[Array, "chunk"], block_size: int
) -> Int[Array, "step chunk"]:
    blocks = tables.at[:, keys // block_size].get(mode="clip")
    return blocks * block_size + (keys % block_size)[None]


def _gather(
    plane: Shaped[Array, "num_blocks block_size kv_heads head_dim"],
    slots: Int[Array, "step chunk"],
    inside: Bool[Array, "step chunk"],
    dtype,
) -> Float[Array, "step kv_heads chunk head_dim"]:
    """Rows of a cache plane in a dtype, 0 where no query may look.

    With heads before slots XLA:CPU need not transpose for its matrix products. The zeros are there
    because a NaN would survive a weight of 0.
    """
    num_kv_heads = plane.shape[2]
    flat = plane.reshape(-1, *plane.shape[2:])
    heads = jnp.arange(num_kv_heads)[None, :, None]
    rows = flat.at[slots[:, None], heads].get(mode="clip")
    rows = jnp.where(inside[:, None, :, None], rows, 0)
    return rows.astype(dtype)


def _logits(
    call: Call,
    scaled: Float[Array, "step kv_heads rows head_dim"],
    key: Float[Array, "step kv_heads chunk head_dim"],
    tiles: Tiles,
    keys: Int[Array, "1 chunk"],
    visible: Bool[Array, "step tile chunk"],
    slopes: Float[Array, "num_heads"] | None,
    added: Float[Array, "step heads tile chunk"] | None,
) -> Float[Array, "step kv_heads rows chunk"]:
    spec = call.spec
    logits = jnp.einsum("bhrd,bhkd->bhrk", scaled, key, precision="highest")
    if spec.logits_soft_cap is not None:
        logits = spec.logits_soft_cap * jnp.tanh(logits / spec.logits_soft_cap)
    step, tile = tiles.tokens.shape
    by_head = logits.reshape(step, -1, tile, keys.shape[1])
    if slopes is not None:
        by_head = by_head + alibi_bias(tiles.positions, keys, slopes)
    if added is not None:
        by_head = by_head + added
    return jnp.where(visible[:, None], by_head, -jnp.inf).reshape(logits.shape)


def _shown(
    plane: Float[Array, "step kv_heads chunk dim"],
    added: Float[Array, "step heads tile chunk"],
) -> Float[Array, "step kv_heads chunk dim"]:
    """Keys or values, 0 where a bias leaves none to see them: as for those outside."""
    step, heads, _, chunk = added.shape
    kv_heads = plane.shape[1] if heads > 1 else 1
    shown = (added > -jnp.inf).any(axis=2).reshape(step, kv_heads, -1, chunk).any(axis=2)
    return jnp.where(shown[..., None], plane, 0)

"""Packed queries cut into tiles, each within one sequence: their tokens and the keys they see."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ..._arrays.namespace import cdiv
from ..._dispatch.call import Call
from ...batch.indices import sequence_ids
from ...batch.metadata import Sequences
from ...masks import key_range


class Lines(NamedTuple):
    """Of tiles of draft trees: their lines of descent, and what their sequences bring."""

    ancestors: Int[Array, "num_tiles tile words"]
    starts: Int[Array, "num_tiles"]
    context_lens: Int[Array, "num_tiles"]


class Tiles(NamedTuple):
    """Runs of up to `tile` query tokens, each of one sequence; unused tiles have no valid row."""

    tokens: Int[Array, "num_tiles tile"]
    valid: Bool[Array, "num_tiles tile"]
    positions: Int[Array, "num_tiles tile"]
    tables: Int[Array, "num_tiles max_blocks"]
    first_key: Int[Array, "num_tiles"]
    last_key: Int[Array, "num_tiles"]
    selected: Int[Array, "num_tiles kv_heads num_selected"] | None = None
    lines: Lines | None = None


def cut(
    call: Call,
    batch: Sequences,
    tile: int,
    selection: Int[Array, "num_seqs kv_heads num_selected"] | None,
) -> Tiles:
    """Cuts the batch into tiles. Their number is bounded by shapes alone."""
    first_tiles = _tile_starts(batch, tile)
    num_tiles = min(call.num_tokens, call.num_tokens // tile + call.num_seqs)
    owners = sequence_ids(first_tiles, num_tiles)
    used, seqs = owners >= 0, jnp.maximum(owners, 0)
    offsets = (jnp.arange(num_tiles, dtype=jnp.int32) - first_tiles[seqs])[:, None] * tile
    offsets = offsets + jnp.arange(tile, dtype=jnp.int32)[None]
    valid = used[:, None] & (offsets < batch.query_lens[seqs][:, None])
    starts, context_lens = batch.query_start_loc[seqs], batch.context_lens[seqs]
    tokens, slots = starts[:, None] + offsets, context_lens[:, None] + offsets
    positions, lowest, lines = slots, slots[:, 0], None
    if batch.tree is not None:
        tree = jax.tree.map(lambda array: array.at[tokens].get(mode="clip"), batch.tree)
        positions = context_lens[:, None] + tree.depths
        lowest = jnp.min(jnp.where(valid, positions, call.capacity), axis=1)
        lines = Lines(tree.ancestors, starts, context_lens)
    first, last = _key_range(call, lowest, slots, valid, batch.seq_lens[seqs])
    selected = None if selection is None else selection[seqs]
    return Tiles(tokens, valid, positions, batch.block_tables[seqs], first, last, selected, lines)


def _tile_starts(batch: Sequences, tile: int) -> Int[Array, "num_seqs_plus_1"]:
    counts = cdiv(batch.query_lens, tile)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts).astype(jnp.int32)])


def _key_range(
    call: Call,
    lowest: Int[Array, "num_tiles"],
    slots: Int[Array, "num_tiles tile"],
    valid: Bool[Array, "num_tiles tile"],
    seq_lens: Int[Array, "num_tiles"],
) -> tuple[Int[Array, "num_tiles"], Int[Array, "num_tiles"]]:
    """For each tile the keys `[first, last)` that its rows may see; no row sees any other.

    lowest is the least position of a tile's rows, and slots say where their own keys lie.
    """
    highest = jnp.max(jnp.where(valid, slots, -1), axis=1)
    num_keys = jnp.where(valid.any(axis=1), seq_lens, 0)
    return key_range(lowest, highest, num_keys, call.spec.causal, call.window)


def first_rows(tiles: Tiles, count: int) -> Tiles:
    """The tiles with fewer rows."""
    tokens, valid, positions = (array[:, :count] for array in tiles[:3])
    lines = tiles.lines
    if lines is not None:
        lines = lines._replace(ancestors=lines.ancestors[:, :count])
    return tiles._replace(tokens=tokens, valid=valid, positions=positions, lines=lines)


def grouped(tiles: Tiles, size: int) -> Tiles:
    """Tiles in groups of `size`, filled up with tiles that see nothing."""
    missing = -tiles.first_key.shape[0] % size

    def group(array):
        fill = jnp.zeros((missing, *array.shape[1:]), array.dtype)
        return jnp.concatenate([array, fill]).reshape(-1, size, *array.shape[1:])

    return jax.tree.map(group, tiles)


def rows_of_tokens(
    call: Call, batch: Sequences, tile: int
) -> tuple[Int[Array, "num_tokens"], Bool[Array, "num_tokens"]]:
    """For each token its row among all rows of all tiles, and whether it has one (no padding)."""
    seqs = sequence_ids(batch.query_start_loc, call.num_tokens)
    live, seqs = seqs >= 0, jnp.maximum(seqs, 0)
    offsets = jnp.arange(call.num_tokens, dtype=jnp.int32) - batch.query_start_loc[seqs]
    return _tile_starts(batch, tile)[seqs] * tile + offsets, live

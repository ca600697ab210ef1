"""Which rows and which keys each tile of work has: found on the device, from lengths on the device.

A tile is 16 units of one sequence and one head of keys; a unit is 8 query tokens of one query head.
Unit u of a sequence is head `u % group` of token block `u // group`, so heads that share keys share
tiles. The last token block ends where the sequence ends: it overlaps the one before it, and what
both compute is the same, so that whole units are loaded and stored; only sequences of fewer than 8
tokens have units with rows to spare.

Padding tokens are one more sequence, without keys.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .kernel_config import UNIT, WARPGROUP, KernelConfig


class Tile(NamedTuple):
    """Of one tile, or arrays of one element a tile."""

    sequence: Any
    begin: Any  # where the sequence's queries are in the packed axis
    query_len: Any
    key_len: Any
    first_unit: Any
    slot: Any  # its number before the longest were put first


class Table(NamedTuple):
    """All tiles as `int32` arrays in the device's memory."""

    tiles: Any  # [max_tiles, 6], those of most keys first
    count: Any  # [1]: how many there are


def unsigned_cdiv(a, b: int):
    """`cdiv` of numbers from 0 on, as one division: `//` adds operations for signs."""
    return lax.div(a + (b - 1), jnp.int32(b))


def schedule_of(config: KernelConfig, query_start_loc, seq_lens) -> Table:
    """The tiles of all sequences and of the padding, those of most keys first."""
    tiles = tiles_of(config, query_start_loc, seq_lens)
    _, query_lens, _ = sequences(config, query_start_loc, seq_lens)
    total = jnp.sum(counts_of(config, query_lens), dtype=jnp.int32, keepdims=True)
    steps = jnp.where(tiles.slot < total, key_blocks(config, tiles).count, -1)
    order = jnp.argsort(-steps)
    table = jnp.stack(tiles, axis=1).astype(jnp.int32)[order]
    return Table(table, jnp.minimum(total, config.max_tiles))


def tiles_of(config: KernelConfig, query_start_loc, seq_lens) -> Tile:
    """The tiles in the order of their slots; behind the last one, any."""
    begins, query_lens, key_lens = sequences(config, query_start_loc, seq_lens)
    counts = counts_of(config, query_lens)
    ends = jnp.cumsum(counts)
    slots = jnp.arange(config.max_tiles, dtype=jnp.int32)
    owner = jnp.sum(slots[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    seq = jnp.minimum(owner, len(counts) - 1)
    first_unit = (slots - (ends - counts)[seq]) * config.units
    return Tile(seq, begins[seq], query_lens[seq], key_lens[seq], first_unit, slots)


def counts_of(config: KernelConfig, query_lens):
    """Tiles of each sequence, for each head of keys."""
    return unsigned_cdiv(num_units(config, query_lens), config.units)


def sequences(config: KernelConfig, query_start_loc, seq_lens):
    """begin, query_len and key_len of each sequence and of the padding, inside their arrays."""
    starts = jnp.clip(query_start_loc, 0, config.num_tokens).astype(jnp.int32)
    starts = jnp.append(starts, config.num_tokens).astype(jnp.int32)
    query_lens = jnp.maximum(starts[1:] - starts[:-1], 0)
    key_lens = jnp.clip(seq_lens, 0, config.max_blocks * config.block_size).astype(jnp.int32)
    return starts[:-1], query_lens, jnp.append(key_lens, 0).astype(jnp.int32)


class KeyBlocks(NamedTuple):
    """The steps of a tile: blocks `last`, `last - 1`, ..., `count` of them.

    Blocks from `full_begin` up to, not including, `full_end` are visible to every row.
    """

    last: Any
    count: Any
    full_begin: Any
    full_end: Any


def token_of(query_len, block):
    """The first token of a block of tokens."""
    return jnp.minimum(block * UNIT, jnp.maximum(query_len - UNIT, 0))


def unit_of(config: KernelConfig, tile: Tile, row):
    """The unit of each of some rows of a tile."""
    unit = tile.first_unit + lax.div(row, jnp.int32(UNIT))
    return jnp.minimum(unit, num_units(config, tile.query_len) - 1)


def token_at(config: KernelConfig, tile: Tile, row):
    """The token, in its sequence, of each of some rows of a tile."""
    block = lax.div(unit_of(config, tile, row), jnp.int32(config.group))
    return token_of(tile.query_len, block) + lax.rem(row, jnp.int32(UNIT))


def num_units(config: KernelConfig, query_len):
    return unsigned_cdiv(query_len, UNIT) * config.group


def has_rows(config: KernelConfig, tile: Tile, warpgroup):
    """Whether any row of a warpgroup is of its own: the second has none in a decode's tile."""
    first = tile.first_unit + warpgroup * (WARPGROUP // UNIT)
    return first < num_units(config, tile.query_len)


def key_blocks(config: KernelConfig, tile: Tile) -> KeyBlocks:
    """Every tile has one step at least, so that a row without keys needs no program of its own."""
    last_unit = jnp.minimum(tile.first_unit + config.units, num_units(config, tile.query_len)) - 1
    context, group = tile.key_len - tile.query_len, jnp.int32(config.group)
    first = context
    if not config.words:  # else any token may stand there, and none sees all of those before it
        first += token_of(tile.query_len, lax.div(tile.first_unit, group))
    last = context + token_of(tile.query_len, lax.div(last_unit, group)) + UNIT - 1
    last = jnp.minimum(last, tile.key_len - 1)
    begin, end = reach(config, first, last, tile.key_len)
    block = lax.div(begin, jnp.int32(config.keys))
    last_block = jnp.maximum(unsigned_cdiv(end, config.keys) - 1, block)
    full_begin, full_end = common(config, first, last, tile.key_len)
    full_end = lax.div(full_end, jnp.int32(config.keys))
    return KeyBlocks(
        last_block, last_block - block + 1, unsigned_cdiv(full_begin, config.keys), full_end
    )


def reach(config: KernelConfig, first, last, key_len):
    """The keys that some position from `first` to `last` may see: from, and up to."""
    window, begin, end = config.spec.sliding_window, 0 * first, key_len
    if config.spec.causal:
        end = jnp.minimum(end, last + 1)
    elif window is not None:
        end = jnp.minimum(end, last + window)
    if window is not None:
        begin = jnp.maximum(first - window + 1, 0)
    end = jnp.maximum(end, 0)
    return jnp.minimum(begin, end), end


def common(config: KernelConfig, first, last, key_len):
    """The keys that all positions from `first` to `last` see: from, and up to."""
    window, begin, end = config.spec.sliding_window, 0 * first, key_len
    if config.spec.causal:
        end = jnp.minimum(end, first + 1)
    elif window is not None:
        end = jnp.minimum(end, first + window)
    if window is not None:
        begin = jnp.maximum(last - window + 1, 0)
    return begin, jnp.maximum(end, 0)


def first_key(config: KernelConfig, tile: Tile):
    """The first key that some query of the tile's sequence sees."""
    if (window := config.spec.sliding_window) is None:
        return jnp.int32(0)
    return jnp.maximum(tile.key_len - tile.query_len - (window - 1), 0)

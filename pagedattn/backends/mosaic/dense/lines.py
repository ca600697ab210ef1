"""Drafts that branch: which of its sequence's new tokens each row of a tile descends from.

Tables on the device say so for whole words of 32 keys, which begin where a block of keys may: so a
step takes its words as they are. Of keys in the context a table has as many as a step, then those
from the word of the first new token on, then as many of no token: a step far from the new tokens
takes the first ones, whose bits are all set.
"""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from ....batch.draft_tree import DraftTree, key_positions
from ....masks import WORD
from .kernel_config import ROWS, WARPGROUP, KernelConfig
from .registers import LAYOUT, along_columns, columns, load, wide
from .tiles import Tile, token_at


class Lines(NamedTuple):
    """`int32` arrays in the device's memory; None of what a call does not ask for."""

    words: Any = None  # [max_tiles, 2, words, 64]: a bit for each key that a row may see
    depths: Any = None  # [max_tiles, 2, 64], of each row
    lags: Any = None  # [max_tiles, words * 32]: by how much keys' positions are below their slots


def words_of_step(config: KernelConfig) -> int:
    return config.keys // WORD


def lines_of(config: KernelConfig, tree: DraftTree, tiles: Tile) -> Lines:
    """The tables, for tiles in the order of their slots."""
    tile = Tile(*(field[:, None] for field in tiles))
    token = tile.begin + token_at(config, tile, jnp.arange(ROWS, dtype=jnp.int32))
    token = jnp.clip(token, 0, len(tree.depths) - 1)
    context = tile.key_len - tile.query_len
    words = key_words(config, tree.ancestors[token], context[..., None])
    size = len(words), 2, WARPGROUP
    words = words.reshape(*size, -1).swapaxes(2, 3)
    if not has_positions(config):
        return Lines(words)
    keys = jnp.arange(WORD * words.shape[2], dtype=jnp.int32) - config.keys
    keys = keys + (context & -WORD)
    positions, _ = key_positions(tree.depths, tiles.begin, context[:, 0], keys)
    return Lines(words, tree.depths[token].reshape(size), keys - positions)


def has_positions(config: KernelConfig) -> bool:
    """Whether it matters where tokens stand, beside whom they descend from."""
    return config.spec.sliding_window is not None or config.spec.alibi_slopes is not None


def key_words(config: KernelConfig, ancestors, context):
    """Words of keys from words of new tokens, which begin `context` keys later."""
    own = [(0, 0)] * (ancestors.ndim - 1)
    beside = words_of_step(config) + 1
    words = jnp.pad(ancestors, [*own, (beside, 0)], constant_values=-1)
    words = jnp.pad(words, [*own, (0, beside)])
    shift = context & (WORD - 1)
    carried = lax.shift_right_logical(words[..., :-1], 1)  # in two steps: no shift is by 32
    return words[..., 1:] << shift | lax.shift_right_logical(carried, WORD - 1 - shift)


class Keys(NamedTuple):
    """Of the keys of a step, as matrices: their slots and positions from the first slot on."""

    first: Any
    slots: Any
    positions: Any
    words: Any = None  # row vectors, if a row's line says which keys it sees


def keys_of(config: KernelConfig, block) -> Keys:
    """Those of a block in the context."""
    slots = columns(config)
    return Keys(block * config.keys, slots, slots)


def keys_in_lines(config: KernelConfig, lines: Lines, tile: Tile, warpgroup, block) -> Keys:
    """Those of any block. Loads from tables: to be called before what they can run beside."""
    first, slots, _, _ = keys_of(config, block)
    count = words_of_step(config)
    known = lines.words.shape[2] - count
    begin = lax.shift_right_arithmetic(tile.key_len - tile.query_len, 5)
    begin = jnp.clip(block * count - begin + count, 0, known)
    words = [
        load(lines.words.at[tile.slot, warpgroup, begin + i], LAYOUT.reduce(1))
        for i in range(count)
    ]
    if not has_positions(config):
        return Keys(first, slots, slots, words)
    lags = load(lines.lags.at[tile.slot, pl.ds(begin * WORD, config.keys)], LAYOUT.reduce(0))
    return Keys(first, slots, slots - along_columns(lags, slots), words)


def in_line(keys: Keys):
    """Whether each row may see each key."""
    word = wide(keys.words[0], keys.slots)
    for i, next_word in enumerate(keys.words[1:], 1):
        word = jnp.where(keys.slots < WORD * i, word, wide(next_word, keys.slots))
    return (lax.shift_right_logical(word, keys.slots & (WORD - 1)) & 1) == 1

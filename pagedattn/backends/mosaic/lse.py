"""Log-sum-exps from where tiles put them to where tokens are."""

import jax.numpy as jnp
from jax import lax

from .shape import ROWS, UNIT, Shape
from .tiles import counts_of, sequences, token_of


def by_token(shape: Shape, query_start_loc, seq_lens, lse):
    """`f32[num_tokens, num_heads]` from `f32[max_tiles, num_kv_heads, 2, 64]`."""
    begins, query_lens, _ = sequences(shape, query_start_loc, seq_lens)
    token = jnp.arange(shape.num_tokens, dtype=jnp.int32)
    seq = jnp.sum(token[:, None] >= (begins + query_lens)[None, :], axis=1, dtype=jnp.int32)
    seq = jnp.minimum(seq, len(begins) - 1)
    index = token - begins[seq]
    block = lax.div(index, jnp.int32(UNIT))
    row = index - token_of(query_lens[seq], block)
    head = jnp.arange(shape.num_heads, dtype=jnp.int32)
    unit = block[:, None] * shape.group + head % shape.group
    slot = first_tile(shape, query_lens, seq)[:, None] + unit // shape.units
    place = unit % shape.units * UNIT + row[:, None]
    tiles = lse.reshape(shape.max_tiles, shape.num_kv_heads, ROWS)
    return tiles.at[slot, head // shape.group, place].get(mode="clip")


def first_tile(shape: Shape, query_lens, seq):
    """The number of the first tile of each of some sequences."""
    if shape.parts:
        return seq
    counts = counts_of(shape, query_lens)
    return (jnp.cumsum(counts) - counts)[seq]

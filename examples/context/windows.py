"""Sliding windows and ALiBi over keys that are spread over devices.

A window shows each new token the last ones of the keys that a device has, from anywhere in a block
on: so each is a sequence of its own there, in blocks of one token, and needs no mask. ALiBi depends
on how far back a key lies: a device knows where its own stand, and says so by a bias.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from context.blocks import AXIS, length_here, positions_of
from pagedattn import AttentionSpec, BatchMetadata, alibi_bias
from pagedattn.extend import cdiv, sequence_ids


def in_window(
    batch: BatchMetadata, window: int
) -> tuple[Int[Array, "num_tokens num_keys"], BatchMetadata]:
    """What a window shows each new token of the keys that lie here, as a sequence of its own.

    Returns:
      the keys, counted among those of the sequence that lie here; the batch, in blocks of one
      token: a window may begin anywhere in a block.
    """
    size, seqs = batch.block_size, sequence_ids(batch.query_start_loc, batch.num_tokens)
    oldest = jnp.maximum(batch.positions - window + 1, 0)
    first = length_here(oldest, seqs, size)
    most = cdiv(cdiv(window - 2, size) + 1, jax.lax.axis_size(AXIS))
    tokens = first[:, None] + jnp.arange(min(most, batch.max_blocks) * size, dtype=jnp.int32)
    blocks = jnp.take_along_axis(batch.block_tables[seqs], tokens // size, axis=1, mode="clip")
    shown = replace(
        batch,
        block_tables=blocks * size + tokens % size,
        seq_lens=jnp.where(seqs < 0, 0, jnp.clip(batch.seq_lens[seqs] - first, 0)),
        query_start_loc=jnp.arange(batch.num_tokens + 1, dtype=jnp.int32),
        block_size=1,
        max_query_len=1,
    )
    return tokens, shown


def bias_here(
    tokens: Int[Array, "*n num_keys"], batch: BatchMetadata, spec: AttentionSpec
) -> Float[Array, "num_tokens heads num_keys"]:
    """ALiBi of keys that lie here, `tokens` of each new token's sequence or of all."""
    seqs = sequence_ids(batch.query_start_loc, batch.num_tokens)
    keys = positions_of(tokens, seqs, batch.block_size)
    return alibi_bias(batch.positions[:, None], keys, spec.alibi_slopes)[:, :, 0]

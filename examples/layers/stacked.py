"""One cache for all layers, so that a scan over the layers updates it in place.

A scan that reads one cache a layer and returns a new one for each holds both in memory, and copies.
What a scan carries from layer to layer is updated in place. So the blocks of all layers lie in one
cache, layer after layer, and each layer shifts the block ids of the batch to its own blocks.
"""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Int

from pagedattn import BatchMetadata


def batch_of_layer(batch: BatchMetadata, layer: Int[Array, ""], num_blocks: int) -> BatchMetadata:
    """The batch with the blocks of layer `layer`: its block 0 is block `layer * num_blocks`.

    >>> from pagedattn import make_batch
    >>> batch = batch_of_layer(make_batch([2], [3], [[0, 4]], block_size=4, pad_tokens=3), 2, 10)
    >>> batch.block_tables.tolist(), batch.slot_mapping.tolist()
    ([[20, 24]], [83, 96, -1])
    """
    first, slots = layer * num_blocks, batch.slot_mapping
    return replace(
        batch,
        block_tables=batch.block_tables + first,
        slot_mapping=jnp.where(slots < 0, slots, slots + first * batch.block_size),
    )

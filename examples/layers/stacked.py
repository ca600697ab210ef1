"""One cache for all layers, so that a scan over the layers updates it in place.

A scan that reads one cache a layer and returns a new one for each holds both in memory, and copies.
What a scan carries from layer to layer is updated in place. So the blocks of all layers lie in one
cache, layer after layer, and each layer shifts the block ids of the batch to its own blocks.
"""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Int

from pagedattn import BatchMetadata

Ids = Int[Array, "*shape"]


def ids_of_layer(ids: Ids, layer: Int[Array, ""], count: int) -> Ids:
    """Ids of blocks or slots, `count` for each layer, shifted to those of layer `layer`; -1 stays.

    For the copies of a step, in each layer, as `pagedattn.next_batch` says which:

        ids = (ids_of_layer(x, layer, num_blocks) for x in (growth.copy_src, growth.copy_dst))
        cache = copy_blocks(cache, *ids)
    """
    return jnp.where(ids < 0, -1, ids + layer * count)


def batch_of_layer(batch: BatchMetadata, layer: Int[Array, ""], num_blocks: int) -> BatchMetadata:
    """The batch with the blocks of layer `layer`: its block 0 is block `layer * num_blocks`.

    >>> from pagedattn import make_batch
    >>> batch = batch_of_layer(make_batch([2], [3], [[0, 4]], block_size=4, pad_tokens=3), 2, 10)
    >>> batch.block_tables.tolist(), batch.slot_mapping.tolist()
    ([[20, 24]], [83, 96, -1])
    """
    num_slots = num_blocks * batch.block_size
    return replace(
        batch,
        block_tables=ids_of_layer(batch.block_tables, layer, num_blocks),
        slot_mapping=ids_of_layer(batch.slot_mapping, layer, num_slots),
    )

"""The work items of the kernels over latents, as their programs find them."""

import jax.numpy as jnp

from pagedattn.backends.mosaic.latents import split_kv


def latent_item(config, schedule, part, index):
    """A work item of a part, but for the steps of the program before it."""
    begin, end, first, _, *own = schedule.parts[part]
    others = split_kv.token_fields(schedule, first + index)
    fields = [jnp.where(index == 0, *both) for both in zip(own, others, strict=True)]
    return split_kv.item_of(config, part, first + index, fields, (begin, end), jnp.int32(0))

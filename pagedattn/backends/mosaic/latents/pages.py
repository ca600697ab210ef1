"""Where the keys of a step lie in the cache."""

from collections.abc import Callable

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .kernel_config import KEYS, KernelConfig

WARPS = 4  # of a warpgroup


def by_warps(config: KernelConfig, load_pages: Callable[[range], None]) -> None:
    """Has each warp of a warpgroup load some pages of every step."""

    @plgpu.warp_map
    def warps(warp):
        for number in range(min(WARPS, config.pages)):

            @pl.when(warp == number)
            def some_pages(number=number):
                load_pages(range(number, config.pages, WARPS))


def source(config: KernelConfig, work_item, step, block):
    """Block and rows of a page of a step: the whole block, or the keys of a step."""
    if (parts := config.block_size // KEYS) <= 1:
        return block, slice(None)
    part = lax.rem(jnp.maximum(work_item.last - step, 0), jnp.int32(parts))
    return block, pl.ds(part * KEYS, KEYS)


def block_ids(config: KernelConfig, arrays, work_item, step, pages):
    """Some pages of a step; one past the cache for what is hidden: TMA fills it with zeros."""
    begin = (work_item.last - step) * KEYS
    return [block_id(config, arrays, work_item, begin + i * config.block_size) for i in pages]


def block_id(config: KernelConfig, arrays, work_item, begin):
    index = lax.div(jnp.maximum(begin, 0), jnp.int32(config.block_size))
    index = jnp.minimum(index, config.max_blocks - 1)
    seen = (begin >= 0) & (begin < work_item.limit)
    return jnp.where(seen, arrays.tables[work_item.sequence, index], config.num_blocks)

"""The warpgroup that loads: step after step, each warp some pages of it."""

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu

from ...ring import Ring
from ..kernel_config import KernelConfig
from ..pages import by_warps, each_step, source
from .roles import LOAD_REGISTERS


def load(config: KernelConfig, arrays, scales, ring: Ring, work_items):
    """Latents into the ring, and into `scales` those of tokens, which arrive with them."""
    plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
    by_warps(config, functools.partial(load_pages, config, arrays, scales, ring, work_items))


def load_pages(config: KernelConfig, arrays, scales, ring: Ring, work_items, pages):
    def load_step(work_item, i, blocks, _):
        slot = ring.free_slot(work_item.done + i)
        full = ring.full.at[slot]
        for page, block in zip(pages, blocks, strict=True):
            rows = source(config, work_item, i, block)
            target = ring.room.at[slot, pl.ds(page * config.page_keys, config.page_keys)]
            plgpu.copy_gmem_to_smem(arrays.latents.at[*rows, 0], target, full)
            if config.token_scales:
                target = scales.at[slot, page]
                some = arrays.scales.at[pl.ds(first_token(config, *rows), target.shape[0])]
                plgpu.copy_gmem_to_smem(some, target, full)

    each_step(config, arrays, work_items, pages, load_step)


def first_token(config: KernelConfig, block, keys):
    """The slot of the cache in which the first key of a load is."""
    return block * config.block_size + (0 if keys == slice(None) else keys.start)

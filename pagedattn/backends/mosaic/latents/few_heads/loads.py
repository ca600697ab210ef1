"""The warpgroup that loads: chunk after chunk, each warp some pages of it.

One warp takes a microsecond for the twelve loads of a step in pages of 16: too long for memory.
"""

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu

from ...ring import Ring
from ..kernel_config import KernelConfig
from ..pages import by_warps, each_step, source
from .chunks import CHUNK, CHUNKS


def load(config: KernelConfig, arrays, ring: Ring, work_items):
    by_warps(config, functools.partial(load_pages, config, arrays, ring, work_items))


def load_pages(config: KernelConfig, arrays, ring: Ring, work_items, pages):
    def load_step(work_item, i, blocks, _):
        for chunk in range(CHUNKS):
            slot = ring.free_slot((work_item.done + i) * CHUNKS + chunk)
            for page, block in zip(pages, blocks, strict=True):
                load_page(config, arrays, ring, work_item, i, block, (slot, page, chunk))

    each_step(config, arrays, work_items, pages, load_step)


def load_page(config: KernelConfig, arrays, ring: Ring, work_item, step, block, place):
    """Some columns of a page, into the place of its keys in a slot."""
    slot, page, chunk = place
    rows = source(config, work_item, step, block)
    latents = arrays.latents.at[*rows, 0, pl.ds(chunk * CHUNK, CHUNK)]
    target = ring.room.at[slot, pl.ds(page * config.page_keys, config.page_keys)]
    plgpu.copy_gmem_to_smem(latents, target, ring.full.at[slot])

"""The warpgroup that loads: chunk after chunk, each warp some pages of it.

One warp takes a microsecond for the twelve loads of a step in pages of 16: too long for memory.
"""

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ...ring import Ring
from ..kernel_config import KEYS, KernelConfig
from ..pages import block_ids, by_warps, source
from .chunks import CHUNK, CHUNKS


def load(config: KernelConfig, arrays, ring: Ring, work_items):
    by_warps(config, functools.partial(load_pages, config, arrays, ring, work_items))


def load_pages(config: KernelConfig, arrays, ring: Ring, work_items, pages):
    """Table entries are looked up a step ahead: a load from the table takes longer than a TMA."""

    def visit(work_item, index, _):
        def step(i, ids):
            ahead = block_ids(config, arrays, work_item, i + 1, pages)
            for chunk in range(CHUNKS):
                slot = ring.free_slot((work_item.done + i) * CHUNKS + chunk)
                for page, block in zip(pages, ids, strict=True):
                    load_page(config, arrays, ring, work_item, i, block, (slot, page, chunk))
            return ahead

        first = block_ids(config, arrays, work_item, jnp.int32(0), pages)
        lax.fori_loop(0, work_item.steps, step, first)
        return ()

    work_items(visit, ())


def load_page(config: KernelConfig, arrays, ring: Ring, work_item, step, block, place):
    """Some columns of a page, into the place of its keys in a slot."""
    slot, page, chunk = place
    size = min(config.block_size, KEYS)
    rows = source(config, work_item, step, block)
    latents = arrays.latents.at[*rows, 0, pl.ds(chunk * CHUNK, CHUNK)]
    target = ring.room.at[slot, pl.ds(page * size, size)]
    plgpu.copy_gmem_to_smem(latents, target, ring.full.at[slot])

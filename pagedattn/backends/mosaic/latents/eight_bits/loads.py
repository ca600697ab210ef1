"""The warpgroup that loads: step after step, each warp some pages of it."""

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ...ring import Ring
from ..kernel_config import KEYS, KernelConfig
from ..pages import block_ids, by_warps, source
from .roles import LOAD_REGISTERS


def load(config: KernelConfig, arrays, ring: Ring, work_items):
    plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
    by_warps(config, functools.partial(load_pages, config, arrays, ring, work_items))


def load_pages(config: KernelConfig, arrays, ring: Ring, work_items, pages):
    """Table entries are looked up a step ahead: a load from the table takes longer than a TMA."""

    def visit(work_item, index, _):
        def step(i, ids):
            ahead = block_ids(config, arrays, work_item, i + 1, pages)
            slot = ring.free_slot(work_item.done + i)
            for page, block in zip(pages, ids, strict=True):
                rows = source(config, work_item, i, block)
                load_page(config, arrays, ring, rows, slot, page)
            return ahead

        first = block_ids(config, arrays, work_item, jnp.int32(0), pages)
        lax.fori_loop(0, work_item.steps, step, first)
        return ()

    work_items(visit, ())


def load_page(config: KernelConfig, arrays, ring: Ring, rows, slot, page):
    """A page, into the place of its keys in a slot."""
    size = min(config.block_size, KEYS)
    target = ring.room.at[slot, pl.ds(page * size, size)]
    plgpu.copy_gmem_to_smem(arrays.latents.at[*rows, 0], target, ring.full.at[slot])

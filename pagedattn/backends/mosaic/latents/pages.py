"""Where the keys of a step lie in the cache."""

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ..warpgroup import WARPS
from .kernel_config import KEYS, KernelConfig
from .split_kv import Schedule, item_of


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


def first_blocks(config: KernelConfig, schedule: Schedule, tables):
    """The blocks of each part's first step, `int32[parts, pages]`: no look-ups in kernels."""

    def of_part(part):
        begin, end, first, _, *fields = schedule.parts[part]
        work_item = item_of(config, part, first, fields, (begin, end), jnp.int32(0))
        entries = table_entries(config, tables, work_item, range(config.pages), 0)
        return jnp.clip(jnp.stack(entries), 0, config.num_blocks)

    return jax.vmap(of_part)(jnp.arange(config.parts, dtype=jnp.int32))


def each_step(config: KernelConfig, arrays, work_items, pages, load_step):
    """Has `load_step(work_item, step, blocks, turn)` load some pages of every step.

    `turn` is the step modulo `config.steps_at_once`: which of the buffers it loads. Table entries
    are looked up a step ahead: a load from them takes longer than a TMA. It comes behind the TMA,
    which would else wait for it.
    """
    at_once = config.steps_at_once
    begin = [arrays.first_blocks[work_items.part, page] for page in pages]

    def visit(work_item, index, begin):
        look_up = functools.partial(table_entries, config, arrays.tables, work_item, pages)

        def steps(i, entries):
            for turn in range(at_once):
                step = i * at_once + turn
                blocks = seen_blocks(config, work_item, pages, step, entries)
                load_step(work_item, step, blocks, turn)
                entries = look_up(step + 1)
            return entries

        first = lax.cond(index == 0, lambda: begin, lambda: look_up(jnp.int32(0)))
        lax.fori_loop(0, lax.div(work_item.steps, jnp.int32(at_once)), steps, first)
        return begin

    work_items(visit, begin)


def first_keys(config: KernelConfig, work_item, pages, step):
    """Where some pages of a step begin in the sequence."""
    begin = (work_item.last - step) * KEYS
    return [begin + i * config.block_size for i in pages]


def table_entries(config: KernelConfig, tables, work_item, pages, step):
    """Blocks of some pages of a step; of hidden ones any, which `seen_blocks` replaces."""
    places = [
        lax.div(jnp.maximum(begin, 0), jnp.int32(config.block_size))
        for begin in first_keys(config, work_item, pages, step)
    ]
    last = config.max_blocks - 1
    return [tables[work_item.sequence, jnp.minimum(place, last)] for place in places]


def seen_blocks(config: KernelConfig, work_item, pages, step, entries):
    """One past the cache for what is hidden: TMA fills it with zeros."""
    return [
        jnp.where((begin >= 0) & (begin < work_item.limit), entry, config.num_blocks)
        for begin, entry in zip(first_keys(config, work_item, pages, step), entries, strict=True)
    ]

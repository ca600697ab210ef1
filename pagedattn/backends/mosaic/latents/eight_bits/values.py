"""The two warpgroups that sum weighted values, 256 columns each; that of the keys leaves weights.

A sum has a row for each column of the values and a column for each head.
"""

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ...dense.registers import load, store
from ..cut_tokens import Places, Sums, finish, normalised
from ..kernel_config import KEYS, KernelConfig
from ..opaque import opaque
from ..softmax import LAYOUT, shrink_columns
from .operands import (
    COLUMNS,
    FEW_KEYS,
    MATRICES,
    PIECE,
    VALUE_NUMBERS,
    VALUE_VECTORS,
    results_of,
    seen_alone,
    value_operands,
)
from .roles import VALUE_REGISTERS

ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]  (not private: its documents name it)
HEADS_AXIS = 1
GROUPS = [pl.ds(begin, FEW_KEYS) for begin in range(0, KEYS, FEW_KEYS)]  # of a step's keys


def add_values(config: KernelConfig, arrays, memory, rings, work_items, place):
    half, tile = place
    plgpu.set_max_registers(VALUE_REGISTERS, action="increase")
    parts = tuple((pl.ds(i * PIECE, PIECE),) for i in range(MATRICES))
    places = Places(tile, half, parts, HEADS_AXIS)

    def visit(work_item, index, _):
        walk = Walk(config, memory, rings, work_item, half)
        zeros = plgpu.layout_cast(jnp.zeros((PIECE, config.rows), jnp.float32), LAYOUT)
        values = lax.fori_loop(jnp.int32(0), work_item.steps, walk.step, (zeros,) * MATRICES)
        slot = rings.sums.slot(index)
        plgpu.barrier_wait(rings.sums.full.at[slot])
        top, total = (load(memory.sums.at[slot, i], LAYOUT.reduce(0)) for i in range(2))
        plgpu.barrier_arrive(rings.sums.free.at[slot])
        put = functools.partial(put_results, config, arrays, work_item.token, place)
        finish(arrays, work_item, places, Sums(values, top, total), put)
        return ()

    work_items(visit, ())


def columns_of(half):
    return pl.ds(pl.multiple_of(half * COLUMNS, COLUMNS), COLUMNS)


class Walk:
    """The steps of one work item, one after the other."""

    def __init__(self, config: KernelConfig, memory, rings, work_item, half):
        self.config, self.memory, self.rings = config, memory, rings
        self.work_item, self.columns = work_item, columns_of(half)

    def step(self, i, sums):
        number = self.work_item.done + i
        place, buffer = self.rings.latents.slot(number), self.rings.weights.slot(number)
        plgpu.barrier_wait(self.rings.latents.full.at[place])
        plgpu.barrier_wait(self.rings.weights.full.at[buffer])
        self.hide_values(place, self.work_item.visible_keys(i))
        sums = shrink_columns(sums, load(self.memory.correction.at[buffer], LAYOUT.reduce(0)))
        sums = self.add_products(place, buffer, sums)
        plgpu.commit_smem()  # the values have been read
        plgpu.barrier_arrive(self.rings.weights.free.at[buffer])
        plgpu.barrier_arrive(self.rings.latents.free.at[place])
        return sums

    def add_products(self, place, buffer, sums):
        def products(*refs):
            for ref, before in zip(refs, sums, strict=True):
                ref[...] = before
            numbers, zero = self.numbers(place, GROUPS[0]), opaque(0)
            for keys, following in zip(GROUPS, [*GROUPS[1:], None], strict=True):
                ahead = self.numbers(place, following) if following else None
                weights = self.memory.weights.at[buffer + zero, :, keys].transpose((1, 0))
                for ref, operand in zip(refs, value_operands(numbers), strict=True):
                    plgpu.wgmma(ref, operand, weights)
                plgpu.wgmma_wait(MATRICES)
                numbers = ahead
            return tuple(ref[...] for ref in refs)

        return pl.run_scoped(products, *[ACC((PIECE, self.config.rows))] * MATRICES)

    def numbers(self, place, keys):
        return load(self.memory.latents.at[place, keys, self.columns], VALUE_NUMBERS)

    def hide_values(self, place, visible):
        """Zeros for the values that no query sees: a weight of 0 leaves NaN as it is."""

        @pl.when((visible > 0) & (visible < KEYS))
        def zeros():
            for begin, keys in zip(range(0, KEYS, FEW_KEYS), GROUPS, strict=True):
                shape = FEW_KEYS, COLUMNS // 8
                key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=VALUE_VECTORS)
                seen = jnp.where(begin + key < visible, -1, 0)
                numbers = seen_alone(self.numbers(place, keys), seen)
                self.memory.latents.at[place, keys, self.columns][...] = numbers


def put_results(config: KernelConfig, arrays, token, place, sums: Sums):
    half, tile = place
    means, lse = normalised(sums, HEADS_AXIS)
    heads, columns = pl.ds(tile * config.rows, config.rows), columns_of(half)
    out = arrays.out.at[token, heads, columns]
    out[...] = results_of([values.astype(out.dtype) for values in means])

    @pl.when(half == 0)
    def once():
        store(arrays.lse.at[token, tile], lse)

"""The warpgroup that computes: keys times queries, their softmax, values times weights.

Logits have a row for each key and a column for each head, sums a row for each column of the values.
"""

import functools
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ...ring import Ring
from .. import hidden_values
from ..cut_tokens import Sums, finish
from ..kernel_config import KEYS, KernelConfig
from ..opaque import opaque
from ..softmax import LAYOUT, shrink_columns, weigh, wide
from .chunks import CHUNKS, PIECE, PIECES, pieces, value_columns
from .results import HEADS_AXIS, places, store

ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]  (not private: its documents name it)
TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED


class State(NamedTuple):
    """Of each head, after some steps.

    Fields:
      sums: weighted values, `f32[columns, heads]` of each chunk.
      top: about the largest logit so far, `f32[heads]`.
      weights: sums of weights relative to it, `f32[keys, heads]`: row r has those of keys r,
        r + 64, r + 128, ...
    """

    sums: tuple[Any, ...]
    top: Any
    weights: Any


def compute(config: KernelConfig, arrays, memory, queries, ring: Ring, work_items, tile):
    def visit(work_item, index, _):
        load_queries(config, arrays, memory, queries, work_item.token, tile)
        walk = Walk(config, memory, ring, work_item)
        state = lax.fori_loop(jnp.int32(0), work_item.steps, walk.step, nothing(config))
        sums = Sums(state.sums, state.top, state.weights.sum(axis=0))
        put = functools.partial(store, config, arrays, memory, work_item.token, tile)
        finish(arrays, work_item, places(tile), sums, put)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        return ()

    work_items(visit, ())
    plgpu.wait_smem_to_gmem(0)


def load_queries(config: KernelConfig, arrays, memory, full, token, tile):
    heads = pl.ds(tile * config.rows, config.rows)
    for piece in range(PIECES):
        queries = arrays.query.at[token, heads, pl.ds(piece * PIECE, PIECE)]
        plgpu.copy_gmem_to_smem(queries, memory.query.at[piece], full)
    plgpu.barrier_wait(full)


def nothing(config: KernelConfig) -> State:
    def zeros(rows):
        return plgpu.layout_cast(jnp.zeros((rows, config.rows), jnp.float32), LAYOUT)

    top = plgpu.layout_cast(jnp.full((config.rows,), -jnp.inf, jnp.float32), LAYOUT.reduce(0))
    return State(tuple(zeros(value_columns(i)) for i in range(CHUNKS)), top, zeros(KEYS))


class Walk:
    """The steps of one work item, one after the other."""

    def __init__(self, config: KernelConfig, memory, ring: Ring, work_item):
        self.config, self.memory, self.ring, self.work_item = config, memory, ring, work_item

    def step(self, i, state: State) -> State:
        slots = [self.ring.slot((self.work_item.done + i) * CHUNKS + n) for n in range(CHUNKS)]
        x = self.visible(i, self.logits(slots))
        weights, top, correction = weigh(self.config, x, state.top, HEADS_AXIS)
        rounded = weights.astype(self.memory.weights.dtype)
        rounded = plgpu.layout_cast(rounded, TRANSPOSED)
        self.memory.weights.at[0].transpose((1, 0))[...] = rounded
        self.hide_values(i, slots)
        plgpu.commit_smem()
        sums = self.add_values(slots, state.sums, correction)
        return State(sums, top, state.weights * wide(correction, x, HEADS_AXIS) + weights)

    def logits(self, slots):
        """By two accumulators: a product that adds to the last one's would wait for it."""

        def products(*refs):
            for chunk, slot in enumerate(slots):
                plgpu.barrier_wait(self.ring.full.at[slot])
                zero = opaque(0)
                for piece, begin in pieces(chunk):
                    keys = self.ring.room.at[slot, :, pl.ds(begin, PIECE)]
                    queries = self.memory.query.at[piece + zero].transpose((1, 0))
                    plgpu.wgmma(refs[piece % 2], keys, queries)
            even, odd = (ref[...] for ref in refs)
            return even + odd

        return pl.run_scoped(products, *[ACC((KEYS, self.config.rows))] * 2)

    def visible(self, i, x):
        row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=LAYOUT)
        return jnp.where(row < self.work_item.visible_keys(i), x, -jnp.inf)

    def add_values(self, slots, sums, correction):
        """Each chunk is free as soon as its values are added."""

        def products(*refs):
            weights = self.memory.weights.at[0].transpose((1, 0))
            rescaled = shrink_columns(sums, correction)
            for chunk, (slot, ref) in enumerate(zip(slots, refs, strict=True)):
                ref[...] = rescaled[chunk]
                values = self.ring.room.at[slot, :, pl.ds(0, value_columns(chunk))]
                plgpu.wgmma(ref, values.transpose((1, 0)), weights)
            for behind, slot in zip(reversed(range(CHUNKS)), slots, strict=True):
                plgpu.wgmma_wait(behind)
                plgpu.barrier_arrive(self.ring.free.at[slot])
            return tuple(ref[...] for ref in refs)

        accs = [ACC((value_columns(chunk), self.config.rows)) for chunk in range(CHUNKS)]
        return pl.run_scoped(products, *accs)

    def hide_values(self, i, slots):
        columns = hidden_values.COLUMNS
        views = [
            self.ring.room.at[slot, :, pl.ds(begin, columns)]
            for chunk, slot in enumerate(slots)
            for begin in range(0, value_columns(chunk), columns)
        ]
        hidden_values.zero(views, self.work_item.visible_keys(i))

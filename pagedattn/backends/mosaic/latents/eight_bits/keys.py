"""The warpgroup of the keys: their products with the queries, and the weights of their values.

Logits have a row for each key and a column for each head.
"""

import functools
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ...dense.float16 import factors
from ...dense.registers import load, store
from ...ring import Ring
from ..kernel_config import HEAD_DIM, KEYS, KernelConfig
from ..opaque import opaque
from ..softmax import LAYOUT, LOG2_E, finite, kept, wide
from .operands import (
    KEY_NUMBERS,
    PIECE,
    QUERY,
    key_operand,
    largest,
    position_of_row,
    query_columns,
    total,
)
from .scales import TokenScales
from .warpgroups import registers, turns

ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]  (not private: its documents name it)
TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED
PIECES = HEAD_DIM // PIECE
LARGEST_WEIGHT = 15.0  # as a power of two: float16 ends at 16
NEW_WEIGHT = 7.0  # of the largest logit, where it is a new one
LEAST_SCALE = 2.0**-100  # so that weights without scales are numbers


class State(NamedTuple):
    """Of each head, after a warpgroup's steps.

    Fields:
      top: what the logarithms of its weights are relative to, `f32[heads]`.
      weights: sums of weights without scales, `f32[keys, heads]`: of every 64th key.
    """

    top: Any
    weights: Any


def weigh_keys(config: KernelConfig, arrays, memory, rings, work_items, place):
    """Where two warpgroups do so in turn, each step takes the top that the other's has left."""
    plgpu.set_max_registers(registers(config).keys, action="increase")
    (turn, tile), each = place, turns(config)

    def visit(work_item, index, _):
        queries = query_pieces(config, arrays, work_item.token, tile)  # while scales are looked up
        walk = Walk(config, memory, rings, work_item, TokenScales(config, arrays, work_item))
        first = (work_item.done + turn) & (each - 1)
        start = nothing(config), walk.scales.first(first)
        put_queries(config, memory, rings.query, queries, (index, turn))

        def step(i, carry):
            return walk.step(first + each * i, turn, carry)

        steps = lax.div(work_item.steps - first + each - 1, jnp.int32(each))
        state, _ = lax.fori_loop(jnp.int32(0), steps, step, start)
        leave_sums(memory, rings, (index, turn), state)
        return ()

    work_items(visit, ())


def leave_sums(memory, rings, place, state: State):
    index, turn = place
    slot = rings.sums.free_slot(index)
    store(rings.sums.room.at[slot, turn, 0], state.top)
    store(rings.sums.room.at[slot, turn, 1], total(state.weights, memory.scratch.at[turn]))
    plgpu.commit_smem()  # the queries have been read, too
    plgpu.barrier_arrive(rings.sums.full.at[slot])
    plgpu.barrier_arrive(rings.query.free.at[0])


def query_pieces(config: KernelConfig, arrays, token, tile):
    heads = pl.ds(tile * config.rows, config.rows)
    columns = [pl.ds(piece * PIECE, PIECE) for piece in range(PIECES)]
    return [load(arrays.query.at[token, heads, part], QUERY) for part in columns]


def put_queries(config: KernelConfig, memory, ring: Ring, pieces, place):
    """Each warpgroup puts some where products find them, in float16; a head has one factor."""
    index, turn = place
    sizes = (jnp.abs(piece.astype(jnp.float32)) for piece in pieces)
    up, down = factors(functools.reduce(jnp.maximum, sizes).max(axis=1))
    slot = ring.free_slot(index)
    for number, queries in enumerate(pieces):

        @pl.when(turn == number % turns(config))
        def put(number=number, queries=queries):
            factor = plgpu.layout_cast(wide(up, queries), QUERY)  # JAX 0.10 finds none
            numbers = (queries.astype(jnp.float32) * factor).astype(jnp.float16)
            ring.room.at[slot, number][...] = query_columns(numbers)

    @pl.when(turn == 0)
    def once():
        store(memory.query_factors, down)

    plgpu.commit_smem()
    plgpu.barrier_arrive(ring.full.at[slot])
    plgpu.barrier_wait(ring.full.at[slot])


def nothing(config: KernelConfig) -> State:
    top = plgpu.layout_cast(jnp.full((config.rows,), -jnp.inf, jnp.float32), LAYOUT.reduce(0))
    zeros = plgpu.layout_cast(jnp.zeros((KEYS, config.rows), jnp.float32), LAYOUT)
    return State(top, zeros)


def scaled(matrix, scale):
    """`matrix f32[keys, heads]` times a number for each key, if there are any."""
    return matrix if scale is None else matrix * wide(scale, matrix)


class Walk:
    """The steps of one work item, one after the other."""

    def __init__(self, config: KernelConfig, memory, rings, work_item, scales):
        self.config, self.memory, self.rings = config, memory, rings
        self.work_item, self.scales = work_item, scales

    def step(self, i, turn, carry):
        state, found = carry
        number, scale, found = self.work_item.done + i, found.scales, self.scales.next(i, found)
        place = self.loaded(number)
        x = self.products(place)
        x = self.visible(i, scaled(x, scale) * wide(self.factor(), x, 1))
        before = self.top_before(number, i)
        top = self.new_top(x, scale, before, turn)
        weights = jnp.exp2(x - wide(finite(top), x, 1))
        self.put(number, scaled(weights, scale), kept(before, top))
        plgpu.barrier_arrive(self.rings.latents.free.at[place])
        summed = state.weights * wide(kept(state.top, top), x, 1) + weights
        return State(top, summed), found

    def loaded(self, number):
        """Where a step's keys are. The other warpgroup's are awaited too: no phase is skipped."""
        ring, each = self.rings.latents, turns(self.config)
        for ahead in reversed(range(1, each)):

            @pl.when(number >= ahead)
            def wait(ahead=ahead):
                plgpu.barrier_wait(ring.full.at[ring.slot(number - ahead)])

        plgpu.barrier_wait(ring.full.at[ring.slot(number)])
        return ring.slot(number)

    def top_before(self, number, i):
        """That of the step before."""
        other = self.rings.tops.slot(number + 1)

        @pl.when(number > 0)
        def wait():
            plgpu.barrier_wait(self.rings.tops.full.at[other])

        top = load(self.memory.tops.at[other], LAYOUT.reduce(0))
        steps_before = plgpu.layout_cast(jnp.full(top.shape, i), LAYOUT.reduce(0))
        return jnp.where(steps_before > 0, top, -jnp.inf)

    def new_top(self, x, scale, before, turn):
        """With its scale a weight is at most 2^LARGEST_WEIGHT: the top stays while it is."""
        if scale is not None:
            x = x + wide(jnp.log2(jnp.maximum(jnp.abs(scale), LEAST_SCALE)), x)
        most = largest(x, self.memory.scratch.at[turn])
        top = jnp.where(most > before + LARGEST_WEIGHT, most - NEW_WEIGHT, before)
        store(self.memory.tops.at[turn], top)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.rings.tops.full.at[turn])
        return top

    def products(self, place):
        """By two accumulators: a product that adds to the last one's would wait for it."""

        def numbers_of(piece):
            return load(self.memory.latents.at[place, :, pl.ds(piece * PIECE, PIECE)], KEY_NUMBERS)

        def products(*refs):
            zero = opaque(0)
            numbers = numbers_of(0)
            for piece in range(PIECES):
                ahead = numbers_of(piece + 1) if piece + 1 < PIECES else None
                queries = self.memory.query.at[zero, piece].transpose((1, 0))
                plgpu.wgmma(refs[piece % 2], key_operand(numbers), queries)
                plgpu.wgmma_wait(1)
                numbers = ahead
            even, odd = (ref[...] for ref in refs)
            return even + odd

        return pl.run_scoped(products, *[ACC((KEYS, self.config.rows))] * 2)

    def factor(self):
        """On the products of each head: its logits are then in base 2."""
        return load(self.memory.query_factors, LAYOUT.reduce(0)) * (self.config.scale * LOG2_E)

    def visible(self, i, x):
        row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=LAYOUT)
        inside = self.work_item.limit - (self.work_item.last - i) * KEYS
        return jnp.where(position_of_row(row) < inside, x, -jnp.inf)

    def put(self, number, weights, shrunk):
        turn = self.rings.weights.free_slot(number)
        rounded = plgpu.layout_cast(weights.astype(jnp.float16), TRANSPOSED)
        self.memory.weights.at[turn].transpose((1, 0))[...] = rounded
        store(self.memory.kept.at[turn], shrunk)
        plgpu.commit_smem()  # the step's keys have been read, too
        plgpu.barrier_arrive(self.rings.weights.full.at[turn])

"""The warpgroup of the keys: their products with the queries, and the weights of their values.

Logits have a row for each key and a column for each head.
"""

import functools
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ....._arrays.namespace import cdiv
from ...dense.registers import load, store
from ...dense.token_scales import gather
from ..kernel_config import HEAD_DIM, KEYS, KernelConfig
from ..opaque import opaque
from ..softmax import LAYOUT, LOG2_E, wide
from .operands import LARGEST_WEIGHT, PIECE, any_too_large, largest, total, weight_operand
from .queries import query_rows, scales_of, split, sum_of_parts
from .roles import KEY_REGISTERS

ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]  (not private: its documents name it)
QUERY = plgpu.Layout.TILED(
    plgpu.Tiling(((8, PIECE), (2, PIECE), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
PER_KEY = LAYOUT.reduce(1)  # one number for each key
COLUMN_SLICES = [pl.ds(begin, PIECE) for begin in range(0, HEAD_DIM, PIECE)]
NEW_WEIGHT = 7.0  # log2 of the largest weight of a head, once its top is raised
LEAST_SCALE = 2.0**-100
LOWEST = -float(jnp.finfo(jnp.float32).max)  # a top by which the weight of any logit is too large


class State(NamedTuple):
    """Of each head.

    Fields:
      top: what the logarithms of its weights are relative to, `f32[heads]`.
      weights: sums of weights without scales, `f32[keys, heads]`: row r has those of keys r,
        r + 64, r + 128, ...
    """

    top: Any
    weights: Any


def weigh_keys(config: KernelConfig, arrays, memory, rings, work_items, tile):
    plgpu.set_max_registers(KEY_REGISTERS, action="increase")

    def visit(work_item, index, _):
        put_queries(config, memory, query_pieces(config, arrays, work_item.token, tile))
        leave_sums(memory, rings.sums, index, Walk(config, memory, rings, work_item).state())
        return ()

    work_items(visit, ())


def leave_sums(memory, ring, index, state: State):
    slot = ring.free_slot(index)
    store(ring.room.at[slot, 0], state.top)
    store(ring.room.at[slot, 1], total(state.weights, memory.scratch))
    plgpu.commit_smem()  # the queries have been read, too
    plgpu.barrier_arrive(ring.full.at[slot])


def query_pieces(config: KernelConfig, arrays, token, tile):
    heads = pl.ds(tile * config.rows, config.rows)
    return [load(arrays.query.at[token, heads, piece], QUERY) for piece in COLUMN_SLICES]


def put_queries(config: KernelConfig, memory, pieces):
    """Their parts where products find them, and a factor for each head."""
    dtype = str(config.cache_dtype)
    largest_ones = functools.reduce(jnp.maximum, map(jnp.abs, pieces)).max(axis=1)
    up, down = scales_of(largest_ones.astype(jnp.float32), dtype)
    for columns, piece in zip(COLUMN_SLICES, pieces, strict=True):
        numbers = piece.astype(jnp.float32)
        factor = plgpu.layout_cast(wide(up, numbers), QUERY)  # JAX 0.10 finds none
        for i, part in enumerate(split(numbers * factor, dtype)):
            memory.query.at[0, pl.ds(i * config.rows, config.rows), columns][...] = part
    store(memory.query_factors, down)
    plgpu.commit_smem()


def of_heads(config: KernelConfig, number: float):
    return plgpu.layout_cast(jnp.full((config.rows,), number, jnp.float32), LAYOUT.reduce(0))


def nothing(config: KernelConfig) -> State:
    top = of_heads(config, LOWEST)
    zeros = plgpu.layout_cast(jnp.zeros((KEYS, config.rows), jnp.float32), LAYOUT)
    return State(top, zeros)


def scaled(matrix, scale):
    """`matrix f32[keys, heads]` times a number for each key, if there are any."""
    return matrix if scale is None else matrix * wide(scale, matrix)


def magnitude(scale):
    """Of scales, but not so little that weights without them overflow float32."""
    return jnp.maximum(jnp.abs(scale), LEAST_SCALE)


def columns_at_once(config: KernelConfig):
    """Slices of columns, with an accumulator each, at most three; float32 additions join them.

    The matrix unit keeps about 14 bits of sums of float8 products; each accumulator takes
    registers.
    """
    count = 1 if config.cache_dtype == "int8" else min(3, 128 // query_rows(config))
    pieces = cdiv(len(COLUMN_SLICES), count) * PIECE
    return [pl.ds(i, min(pieces, HEAD_DIM - i)) for i in range(0, HEAD_DIM, pieces)]


class Walk:
    """The steps of one work item, one after the other."""

    def __init__(self, config: KernelConfig, memory, rings, work_item):
        self.config, self.memory, self.rings, self.work_item = config, memory, rings, work_item

    def state(self):
        """After all steps."""
        last = self.work_item.steps - 1
        _, products = self.products(0)
        state, products = lax.fori_loop(
            jnp.int32(0), last, self.step, (nothing(self.config), products)
        )
        return self.weigh(last, state, products)

    def step(self, i, carry):
        """The next keys are multiplied while these are weighed."""
        state, products = carry
        return self.products(i + 1, functools.partial(self.weigh, i, state, products))

    def products(self, i, meanwhile=lambda: None):
        """What is computed meanwhile, and logits of a step's keys but for their factors.

        The warpgroups of the values, which wait for their weights, release the keys.
        """
        keys = self.memory.latents.at[self.loaded(i)]
        queries = self.memory.query.at[opaque(0)]
        each = columns_at_once(self.config)
        dtype = jnp.int32 if self.config.cache_dtype == "int8" else jnp.float32

        def multiply(*refs):
            for ref, columns in zip(refs, each, strict=True):
                plgpu.wgmma(ref, keys.at[:, columns], queries.at[:, columns].transpose((1, 0)))
            return meanwhile(), [ref[...] for ref in refs]

        accumulators = [ACC((KEYS, queries.shape[0]), dtype)] * len(each)
        done, sums = pl.run_scoped(multiply, *accumulators)
        return done, sum_of_parts(sum(sums[1:], sums[0]), self.config.rows)

    def loaded(self, i):
        """Where a step's keys are."""
        place = self.place(i)
        plgpu.barrier_wait(self.rings.latents.full.at[place])
        return place

    def place(self, i):
        return self.rings.latents.slot(self.work_item.done + i)

    def scale(self, i):
        """Of each key; 0 where it is hidden, whatever is there. None without scales of tokens."""
        if not self.config.token_scales:
            return None
        row = plgpu.broadcasted_iota(jnp.int32, (KEYS,), 0, layout=PER_KEY)
        size = jnp.int32(self.config.page_keys)
        places = lax.div(row, size), lax.rem(row, size)
        found = gather(self.memory.scales.at[self.place(i)], *places, layout=PER_KEY)
        return jnp.where(row < self.work_item.visible_keys(i), found, 0.0)

    def weigh(self, i, state: State, products) -> State:
        """Weights by the top so far, and once more by a new one where any is too large."""
        scale = self.scale(i)
        x = scaled(products, scale)
        x = self.visible(i, x * wide(self.factor(), x, 1))
        place = self.rings.weights.free_slot(self.work_item.done + i)
        weights = jnp.exp2(x - wide(state.top, x, 1))
        too_large = self.put(place, weights, scale, of_heads(self.config, 1.0))

        def anew():
            top = self.new_top(x, scale, state.top)
            weights, correction = jnp.exp2(x - wide(top, x, 1)), jnp.exp2(state.top - top)
            self.put(place, weights, scale, correction)
            return State(top, state.weights * wide(correction, x, 1) + weights)

        state = lax.cond(too_large, anew, lambda: State(state.top, state.weights + weights))
        plgpu.barrier_arrive(self.rings.weights.full.at[place])
        return state

    def factor(self):
        """On the products of each head: its logits are then in base 2."""
        return load(self.memory.query_factors, LAYOUT.reduce(0)) * (self.config.scale * LOG2_E)

    def visible(self, i, x):
        row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=LAYOUT)
        return jnp.where(row < self.work_item.visible_keys(i), x, -jnp.inf)

    def new_top(self, x, scale, before):
        """Where a weight would be too large, so that the largest is 2^NEW_WEIGHT."""
        if scale is not None:
            x = x + wide(jnp.log2(magnitude(scale)), x)
        most = largest(x, self.memory.scratch)
        return jnp.where(most > before + LARGEST_WEIGHT, most - NEW_WEIGHT, before)

    def put(self, place, weights, scale, correction):
        """Whether any weight is too large to be one, once all are in their place."""
        operand = weight_operand(scaled(weights, scale).astype(jnp.float16))
        self.memory.weights.at[place][...] = operand
        store(self.memory.correction.at[place], correction)
        sizes = weights if scale is None else weights * wide(magnitude(scale), weights)
        return any_too_large(sizes)

"""The warpgroups that multiply, in turn: one's softmax runs while the other's products do.

Within a warpgroup the products of the next keys are issued before those of the last values, so that
the softmax in between runs while the latter are computed.
"""

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from . import scores
from .results import store
from .scores import LAYOUT, Softmax
from .shape import WARPGROUP, Shape
from .tiles import KeyBlocks, Tile


def compute(shape: Shape, arrays, memory, barriers, work, warpgroup):
    plgpu.set_max_registers(232, action="increase")

    @pl.when(warpgroup == 1)
    def let_the_first_begin():
        plgpu.barrier_arrive(barriers.turn.at[0])

    def tile_of_work(index, tile: Tile, blocks: KeyBlocks, head, done):
        slot = lax.rem(index, jnp.int32(shape.query_slots))
        rows = scores.rows_of(shape, tile, arrays.slopes, head, warpgroup)
        plgpu.barrier_wait(barriers.query_full.at[slot])
        query = memory.query.at[slot, warpgroup]
        walk = Walk(shape, memory, barriers, warpgroup, query, rows, blocks, done)
        started = walk.first()
        if shape.query_slots > 1:
            pl.when(index > 0)(lambda: release(lax.rem(index - 1, jnp.int32(shape.query_slots))))
        out, state = walk.others(*started)
        store(shape, arrays, memory, tile, head, slot, warpgroup, out, state)
        if shape.query_slots == 1:
            release(slot)

    def release(slot):
        """The next queries may be loaded to where results were, once those are on their way."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(barriers.query_free.at[slot])

    work(tile_of_work)
    plgpu.wait_smem_to_gmem(0)


class Walk:
    """The steps of one tile in one warpgroup."""

    def __init__(self, shape, memory, barriers, warpgroup, query, rows, blocks, done):
        self.shape, self.memory, self.barriers = shape, memory, barriers
        self.warpgroup, self.query, self.rows = warpgroup, query, rows
        self.blocks, self.done = blocks, done

    def key_slot(self, step):
        return lax.rem(self.done + step, jnp.int32(self.shape.key_stages))

    def value_slot(self, step):
        return lax.rem(self.done + step, jnp.int32(self.shape.value_stages))

    def others(self, weights, state):
        """The results of all steps, after the first."""
        size = (WARPGROUP, self.shape.head_dim)
        out = plgpu.layout_cast(jnp.zeros(size, jnp.float32), LAYOUT)
        carry = out, state, weights
        begin = jnp.int32(1)
        for end, masked in self.stretches():
            step = functools.partial(self.step, masked=masked)
            carry = lax.fori_loop(begin, end, step, carry)
            begin = end
        out, state, weights = carry
        return self.last(out, weights), state

    def stretches(self):
        """Up to which step keys are hidden from some rows, then seen by all, then hidden again."""
        last, count, full_begin, full_end = self.blocks
        seen = jnp.clip(last - full_end + 1, 1, count)
        if self.shape.spec.sliding_window is None:
            return (seen, True), (count, False)
        hidden = jnp.clip(last - full_begin + 1, seen, count)
        return (seen, True), (hidden, False), (count, True)

    def first(self):
        """The weights of the first step."""
        step = jnp.int32(0)
        state = Softmax(scores.row_vector(-jnp.inf), scores.row_vector(0.0))
        self.await_keys_and_turn(step)

        def products(x_ref):
            self.multiply_keys(x_ref, step)
            self.pass_turn()
            return x_ref[...]

        x = pl.run_scoped(products, plgpu.ACC((WARPGROUP, self.shape.keys)))
        plgpu.barrier_arrive(self.barriers.key_free.at[self.key_slot(step)])
        weights, state, _ = scores.weigh(self.shape, self.logits(step, x, True), state)
        return weights.astype(self.memory.query.dtype), state

    def step(self, step, carry, masked):
        out, state, weights = carry
        self.await_keys_and_turn(step)

        def products(x_ref, out_ref):
            self.multiply_keys(x_ref, step)
            out_ref[...] = out
            self.multiply_values(out_ref, weights, step - 1)
            self.pass_turn()
            x = plgpu.wgmma_accumulator_load(x_ref, wait_n=1)
            plgpu.barrier_arrive(self.barriers.key_free.at[self.key_slot(step)])
            new = scores.weigh(self.shape, self.logits(step, x, masked), state)
            new = lax.optimization_barrier(new)
            self.memory.order.at[self.warpgroup][...] = new[1].total
            return new, out_ref[...]

        size = (WARPGROUP, self.shape.head_dim)
        accumulators = plgpu.ACC((WARPGROUP, self.shape.keys)), plgpu.ACC(size)
        (weights, state, kept), out = pl.run_scoped(products, *accumulators)
        plgpu.barrier_arrive(self.barriers.value_free.at[self.value_slot(step - 1)])
        return out * scores.wide(kept, out), state, weights.astype(self.memory.query.dtype)

    def last(self, out, weights):
        step = self.blocks.count - 1

        def products(out_ref):
            self.multiply_values(out_ref, weights, step)

        out = pl.run_state(products)(plgpu.ACC.init(out))
        plgpu.barrier_arrive(self.barriers.value_free.at[self.value_slot(step)])
        return out

    def logits(self, step, x, masked):
        block = self.blocks.last - step
        x = scores.logits(self.shape, self.rows, block, x)
        return scores.only_visible(self.shape, self.rows, block, x) if masked else x

    def await_keys_and_turn(self, step):
        plgpu.barrier_wait(self.barriers.key_full.at[self.key_slot(step)])
        plgpu.barrier_wait(self.barriers.turn.at[self.warpgroup])

    def multiply_keys(self, x_ref, step):
        keys = self.memory.key.at[self.key_slot(step)]
        plgpu.wgmma(x_ref, self.query, keys.transpose((1, 0)))

    def multiply_values(self, out_ref, weights, step):
        slot = self.value_slot(step)
        plgpu.barrier_wait(self.barriers.value_full.at[slot])
        plgpu.wgmma(out_ref, weights, self.memory.value.at[slot])

    def pass_turn(self):
        plgpu.barrier_arrive(self.barriers.turn.at[1 - self.warpgroup])

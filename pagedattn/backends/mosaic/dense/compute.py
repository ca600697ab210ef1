"""The warpgroups that multiply, in turn: one's softmax runs while the other's products do.

Within a warpgroup the products of the next keys are issued before those of the last values: the
matrix unit always has work.
"""

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from . import lines, scores
from .float16 import LEAST_UNIT, queries_in_float16, weight_exponent
from .kernel_config import WARPGROUP, KernelConfig
from .registers import LAYOUT, row_vector, wide
from .results import join_or_leave, store
from .scores import Softmax
from .tiles import has_rows
from .token_scales import Exponents, Scales, exponent_places

ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]  (not private: its documents name it)


def compute(config: KernelConfig, arrays, memory, barriers, schedule, warpgroup):
    # A thread of each warpgroup together have 512, or 504 where there are three.
    plgpu.set_max_registers(200 if config.cache_dtype else 232, action="increase")

    @pl.when(warpgroup == 1)
    def let_the_first_begin():
        plgpu.barrier_arrive(barriers.turn.at[0])

    def walk_of(task):
        return Walk(config, arrays, memory, barriers, warpgroup, task)

    def results(walk, out, state, exponent):
        task, slot = walk.task, walk.query_slot
        if exponent is not None:
            out = out * jnp.exp2(exponent)
        state = state._replace(total=state.total.sum(axis=1))
        where = config, arrays, memory, task.tile, task.head, slot, warpgroup
        put = functools.partial(store, *where, walk.scales().value)
        if task.work_item is None:
            put(out, state)
        else:
            join_or_leave(config, arrays, task, warpgroup, out, state, put)

    def begin(task):
        return walk_of(task).first() if config.query_slots > 1 else ()

    def tile_into_next(task, following, has_next, started):
        """The products of the next tile's first keys run beside those of this one's last values."""
        walk = walk_of(task)
        out, state, weights, exponent = walk.middle(*started)

        def with_next():
            return walk.last_beside(walk_of(following), out, weights)

        def without():
            return walk.last(out, weights), (weights, state, exponent, walk.unit)

        out, started = lax.cond(has_next, with_next, without)
        results(walk, out, state, exponent)
        return started

    def tile_alone(task, following, has_next, started):
        walk = walk_of(task)
        out, state, weights, exponent = walk.middle(*walk.first())
        results(walk, walk.last(out, weights), state, exponent)
        walk.release(task.index)
        return started

    schedule(begin, tile_into_next if config.query_slots > 1 else tile_alone)
    plgpu.wait_smem_to_gmem(0)


class Walk:
    """The steps of one tile in one warpgroup."""

    def __init__(self, config, arrays, memory, barriers, warpgroup, task):
        self.config, self.arrays, self.memory = config, arrays, memory
        self.barriers, self.warpgroup = barriers, warpgroup
        self.task, self.blocks, self.done = task, task.blocks, task.done
        self.rows = scores.rows_of(config, arrays, task.tile, task.head, warpgroup)
        self.query_slot = lax.rem(task.index, jnp.int32(config.query_slots))
        self.query = memory.query.at[self.query_slot, warpgroup]
        self.unit = 1.0  # a factor that each row's products of queries and keys need

    def slot(self, step):
        """Where the keys and the values of a step are."""
        return lax.rem(self.done + step, jnp.int32(self.config.stages))

    def await_queries(self):
        plgpu.barrier_wait(self.barriers.query_full.at[self.query_slot])
        if self.config.cache_dtype:
            loaded = self.memory.results.at[self.query_slot, self.warpgroup]
            self.unit = queries_in_float16(loaded, self.query, self.scales().key)

    def scales(self) -> Scales:
        """Those of the tile's head of keys and values, as factors on all products."""
        if self.config.token_scales or not self.config.cache_dtype:
            return Scales(1.0, 1.0)
        return Scales(*(scale[self.task.head] for scale in self.arrays.scales))

    def middle(self, weights, state, exponent, unit):
        """The results of all steps, but for the values of the last, whose exponent is given too."""
        self.unit = unit
        size = (WARPGROUP, self.config.head_dim)
        out = plgpu.layout_cast(jnp.zeros(size, jnp.float32), LAYOUT)
        carry = out, state, weights, exponent
        computes = has_rows(self.config, self.task.tile, self.warpgroup)
        begin = jnp.where(computes, jnp.int32(1), self.blocks.count)
        lax.fori_loop(jnp.int32(1), begin, self.leave_out, None)
        for end, masked in self.stretches():
            step = functools.partial(self.step, masked=masked)
            carry = lax.fori_loop(begin, end, step, carry)
            begin = jnp.maximum(begin, end)
        if self.config.query_slots == 2:
            pl.when(self.blocks.count == 1)(self.release_results)
        else:
            self.release_results()
        return carry

    def end_of_step(self, step):
        """Where two tiles of queries have room, the next one needs it long before this one's end.

        Where three have, it is soon enough after the loops: a branch in them would cost 4 %.
        """
        if self.config.query_slots == 2:
            pl.when(step == 1)(self.release_results)

    def release_results(self):
        """Those of the tile before, if they are in memory of their own."""
        if self.config.query_slots > 1:
            pl.when(self.task.index > 0)(lambda: self.release(self.task.index - 1))

    def release(self, index):
        """The next queries may be loaded to where results were, once those are on their way."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        slot = lax.rem(index, jnp.int32(self.config.query_slots))
        plgpu.barrier_arrive(self.barriers.query_free.at[slot])

    def leave_out(self, step, _):
        """A step of which this warpgroup has no rows: the matrix unit is left to the other one."""
        self.await_keys_and_turn(step)
        self.pass_turn()
        plgpu.barrier_arrive(self.barriers.key_free.at[self.slot(step)])
        before = self.slot(step - 1)
        plgpu.barrier_wait(self.barriers.value_full.at[before])
        plgpu.barrier_arrive(self.barriers.value_free.at[before])
        self.end_of_step(step)

    def stretches(self):
        """Up to which step keys are hidden from some rows, then seen by all, then hidden again."""
        last, count, full_begin, full_end = self.blocks
        seen = jnp.clip(last - full_end + 1, 1, count)
        if self.config.spec.sliding_window is None:
            return (seen, True), (count, False)
        hidden = jnp.clip(last - full_begin + 1, seen, count)
        return (seen, True), (hidden, False), (count, True)

    def first(self):
        """The weights of the first step."""
        step = jnp.int32(0)
        keys = self.keys_of(step, masked=True)
        self.await_queries()
        self.await_keys_and_turn(step)

        def products(x_ref):
            self.multiply_keys(x_ref, step)
            self.pass_turn()
            return x_ref[...]

        x = pl.run_scoped(products, ACC((WARPGROUP, self.config.keys)))
        exponents = self.release_keys(step)
        weights, state, _ = self.weigh(x, keys, True, exponents.key, no_weights())
        weights = weights.astype(self.memory.value.dtype)
        return weights, state, exponents.value, self.unit

    def step(self, step, carry, masked):
        out, state, weights, before = carry
        out, new, exponent = self.beside(self, step, state, masked, out, weights)
        weights, state, correction = new
        if exponent is not None:
            correction = correction * jnp.exp2(before - exponent)
        self.end_of_step(step)
        return out * wide(correction, out), state, weights.astype(self.memory.value.dtype), exponent

    def last_beside(self, following, out, weights):
        """The results, and the weights of the first step of the tile that follows."""
        following.await_queries()
        count, step = self.blocks.count, jnp.int32(0)
        out, new, exponent = self.beside(following, step, no_weights(), True, out, weights, count)
        weights, state, _ = new
        weights = weights.astype(self.memory.value.dtype)
        return out, (weights, state, exponent, following.unit)

    def beside(self, walk, step, state, masked, out, weights, position=None):
        """Weights times the values before a position, beside the weights of a step of a walk."""
        before = (step if position is None else position) - 1
        keys = walk.keys_of(step, masked)
        walk.await_keys_and_turn(step)

        def products(x_ref, out_ref):
            walk.multiply_keys(x_ref, step)
            out_ref[...] = out
            self.multiply_values(out_ref, weights, before)
            self.pass_turn()
            x = plgpu.wgmma_accumulator_load(x_ref, wait_n=1)
            exponents = walk.release_keys(step)
            new = walk.weigh(x, keys, masked, exponents.key, state)
            return out_ref[...], lax.optimization_barrier(new), exponents.value

        size = (WARPGROUP, self.config.head_dim)
        accumulators = ACC((WARPGROUP, self.config.keys)), ACC(size)
        result = pl.run_scoped(products, *accumulators)
        plgpu.barrier_arrive(self.barriers.value_free.at[self.slot(before)])
        return result

    def last(self, out, weights):
        step = self.blocks.count - 1

        def products(out_ref):
            self.multiply_values(out_ref, weights, step)

        out = pl.run_state(products)(ACC.init(out))
        plgpu.barrier_arrive(self.barriers.value_free.at[self.slot(step)])
        return out

    def keys_of(self, step, masked):
        block = self.blocks.last - step
        if not (masked and self.config.words):
            return lines.keys_of(self.config, block)
        tables = self.arrays.lines
        return lines.keys_in_lines(self.config, tables, self.task.tile, self.warpgroup, block)

    def release_keys(self, step) -> Exponents:
        """What the step leaves out of keys and values; its keys have been multiplied."""
        slot, exponents = self.slot(step), Exponents(None, None)
        if (scales := self.memory.scales) is not None:
            places = exponent_places(slot)
            exponents = Exponents(*(scales.exponents[i] for i in places))
        plgpu.barrier_arrive(self.barriers.key_free.at[slot])
        return exponents

    def weigh(self, x, keys, masked, exponent, state):
        """`scores.weigh` of products, whose keys leave out a power of two."""
        unit = self.unit
        if exponent is not None:
            unit = jnp.maximum(unit * jnp.exp2(exponent), LEAST_UNIT)
        x = scores.logits(self.config, self.rows, keys, x, unit)
        if masked:
            x = scores.only_visible(self.rows, keys, x)
        factor = scores.factor(self.config, unit)
        return scores.weigh(x, state, factor, weight_exponent(self.memory.value.dtype))

    def await_keys_and_turn(self, step):
        plgpu.barrier_wait(self.barriers.key_full.at[self.slot(step)])
        plgpu.barrier_wait(self.barriers.turn.at[self.warpgroup])

    def multiply_keys(self, x_ref, step):
        keys = self.memory.key.at[self.slot(step)]
        plgpu.wgmma(x_ref, self.query, keys.transpose((1, 0)))

    def multiply_values(self, out_ref, weights, step):
        slot = self.slot(step)
        plgpu.barrier_wait(self.barriers.value_full.at[slot])
        plgpu.wgmma(out_ref, weights, self.memory.value.at[slot])

    def pass_turn(self):
        plgpu.barrier_arrive(self.barriers.turn.at[1 - self.warpgroup])


def no_weights():
    total = plgpu.layout_cast(jnp.zeros((WARPGROUP, scores.COLUMNS), jnp.float32), LAYOUT)
    return Softmax(row_vector(-jnp.inf), total)

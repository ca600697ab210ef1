"""The two warpgroups that multiply: steps of keys in turn, each sums half of the columns.

A warpgroup computes the weights of every other step. It multiplies them with its half of the
values, and so does the other one, which finds them in shared memory: while one is busy with its
softmax the other keeps the matrix unit at work. Tops of the logits go to and fro with the weights,
so that both know them after every step; each sums the weights of its own steps.
"""

import functools

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ...dense.registers import row_vector
from .. import hidden_values, softmax
from ..cut_tokens import Places, Sums, finish
from ..kernel_config import KEYS, ROWS, KernelConfig
from ..opaque import opaque
from ..softmax import LAYOUT, State, shrink
from .results import HEADS_AXIS, store
from .shares import HALF, TOP, TOTALS

ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]  (not private: its documents name it)
LOGITS, SUMS = ACC((ROWS, KEYS)), ACC((ROWS, HALF))


def compute(config: KernelConfig, arrays, memory, barriers, work_items, tile, me: int):
    plgpu.set_max_registers(240, action="increase")

    def visit(work_item, index, _):
        plgpu.barrier_wait(barriers.query_full)
        out, state = Walk(config, memory, barriers, work_item, me).all()
        state = with_both_totals(memory, barriers, me, state)
        sums = Sums((out,), *state)
        put = functools.partial(store, config, arrays, memory, work_item.token, tile, me)
        finish(arrays, work_item, Places(tile, me, ((),), HEADS_AXIS), sums, put)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(barriers.query_free)
        return ()

    work_items(visit, ())
    plgpu.wait_smem_to_gmem(0)
    release(barriers.last)
    plgpu.barrier_wait(barriers.last)


def with_both_totals(memory, barriers, me: int, state: State) -> State:
    """Each warpgroup has the sum of the weights of its own steps."""
    memory.vectors.at[TOTALS[me]][...] = state.total
    plgpu.barrier_arrive(barriers.totals)
    plgpu.barrier_wait(barriers.totals)
    first, second = (read(memory.vectors.at[i]) for i in TOTALS)
    return State(state.top, first + second)


class Walk:
    """The steps of one work item in one warpgroup: 0, 2, ... or 1, 3, ..."""

    def __init__(self, config: KernelConfig, memory, barriers, work_item, me: int):
        self.config, self.memory, self.barriers = config, memory, barriers
        self.work_item, self.me, self.other = work_item, me, 1 - me

    def all(self):
        """Sums of weighted values, and the state after the last step."""
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, HALF), jnp.float32), LAYOUT)
        none = State(row_vector(-jnp.inf), row_vector(0.0))
        pairs = lax.div(self.work_item.steps, jnp.int32(2))
        if self.me == 1:
            carry = self.odd(jnp.int32(0), (zeros, none), masked=True)
            return lax.fori_loop(jnp.int32(1), pairs, self.odd, carry)
        carry = lax.fori_loop(jnp.int32(1), pairs, self.even, self.first(zeros, none))
        return self.last(*carry)

    def first(self, out, state):
        """The first step, up to its own values."""

        def keys(x_ref):
            self.multiply_rest(x_ref)
            return self.multiply_latent_columns(x_ref)

        x = pl.run_scoped(keys, LOGITS)
        step = jnp.int32(0)
        return self.own_values(step, out, self.weigh(x, step, state, True), True)

    def even(self, i, carry):
        """The values of the step before, which was the other's, beside the keys of this one."""
        out, state = carry

        def products(x_ref, out_ref):
            between = self.other_values(out_ref, out, state)
            self.multiply_rest(x_ref)
            summed = plgpu.wgmma_accumulator_load(out_ref, wait_n=1)
            release(self.values_free(self.other))
            return summed, between, self.multiply_latent_columns(x_ref)

        out, state, x = pl.run_scoped(products, LOGITS, SUMS)
        return self.own_values(2 * i, out, self.weigh(x, 2 * i, state, False), False)

    def last(self, out, state):
        """The values of the last step, which is the other's."""

        def values(out_ref):
            new = self.other_values(out_ref, out, state)
            return out_ref[...], new

        result = pl.run_scoped(values, SUMS)
        release(self.values_free(self.other))
        return result

    def odd(self, i, carry, masked=False):
        """A step of this warpgroup, beside the values of the one before, which is the other's."""
        out, state = carry
        step = 2 * i + 1

        def products(x_ref, out_ref):
            plgpu.barrier_wait(self.barriers.turn)
            self.multiply_rest(x_ref)
            self.multiply_half(x_ref, self.me)
            self.multiply_half(x_ref, self.other)
            between = self.other_values(out_ref, out, state)
            x = plgpu.wgmma_accumulator_load(x_ref, wait_n=1)
            new = lax.optimization_barrier(self.weigh(x, step, between, masked))
            return out_ref[...], new

        out, new = pl.run_scoped(products, LOGITS, SUMS)
        release(self.values_free(self.other))
        return self.own_values(step, out, new, masked)

    def multiply_latent_columns(self, x_ref):
        """Logits of an even step, by the columns of its keys that are values, too.

        `turn` lets the other warpgroup issue its products when all but the last of these are done.
        The half that this warpgroup sums comes first: it was released first, so it is loaded first.
        """
        self.multiply_half(x_ref, self.me)
        self.multiply_half(x_ref, self.other)
        plgpu.wgmma_wait(1)
        plgpu.barrier_arrive(self.barriers.turn)
        return x_ref[...]

    def multiply_rest(self, x_ref):
        """By the columns of the keys that are no values."""
        zero = opaque(0)
        plgpu.barrier_wait(self.barriers.rest_full.at[self.me])
        rest = self.memory.rest.at[self.me + zero].transpose((1, 0))
        plgpu.wgmma(x_ref, self.memory.query_rest.at[zero], rest)

    def multiply_half(self, x_ref, half):
        """By half of the columns that are values, too."""
        zero, me = opaque(0), self.me
        plgpu.barrier_wait(self.barriers.values_full.at[half, me])
        keys = self.memory.values.at[half + zero, me].transpose((1, 0))
        plgpu.wgmma(x_ref, self.memory.query.at[half + zero], keys)

    def other_values(self, out_ref, out, before):
        """Adds what the other's weights give; returns the state after them."""
        slot = self.other
        plgpu.barrier_wait(self.barriers.weights.at[slot])
        plgpu.barrier_wait(self.barriers.values_full.at[self.me, slot])
        top = read(self.memory.vectors.at[TOP])
        correction = softmax.correction(before.top, top)
        out_ref[...] = shrink(out, correction)
        zero = opaque(0)
        values = self.memory.values.at[self.me + zero, slot]
        plgpu.wgmma(out_ref, self.memory.weights.at[zero], values)
        return State(top, before.total * correction)

    def own_values(self, step, out, new, masked):
        weights, state, correction = new
        rounded = weights.astype(self.memory.weights.dtype)
        self.memory.weights.at[0][...] = rounded
        self.memory.vectors.at[TOP][...] = state.top
        if masked:
            self.hide_values(step)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.barriers.weights.at[self.me])
        # The other one waits for nothing of what follows.
        out, weights, correction = lax.optimization_barrier((out, weights, correction))

        def products(out_ref):
            out_ref[...] = shrink(out, correction)
            plgpu.wgmma(out_ref, rounded, self.memory.values.at[self.me + opaque(0), self.me])
            release(self.barriers.rest_free.at[self.me])
            total = state.total * correction + weights.sum(axis=1)
            return out_ref[...], State(state.top, total)

        result = pl.run_scoped(products, SUMS)
        release(self.values_free(self.me))
        return result

    def weigh(self, x, step, state, masked):
        x = self.visible(x, step) if masked else x
        weights, top, correction = softmax.weigh(self.config, x, state.top, HEADS_AXIS)
        return weights, State(top, state.total), correction

    def values_free(self, slot):
        return self.barriers.values_free.at[self.me, slot]

    def visible(self, x, step):
        column = plgpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), 1, layout=LAYOUT)
        return jnp.where(column < self.work_item.visible_keys(step), x, -jnp.inf)

    def hide_values(self, step):
        values, begins = self.memory.values, range(0, HALF, hidden_values.COLUMNS)
        views = [
            values.at[half, self.me, :, pl.ds(begin, hidden_values.COLUMNS)]
            for half in range(2)
            for begin in begins
        ]
        hidden_values.zero(views, self.work_item.visible_keys(step))


def read(rows):
    return plgpu.layout_cast(rows[...], LAYOUT.reduce(1))


def release(barrier):
    """Arrives at a barrier of a cluster, when all threads of the warpgroup are here.

    Such a barrier counts warpgroups, not threads: one thread arrives for the others.
    """
    plgpu.inline_mgpu()(together)()
    plgpu.barrier_arrive(barrier)


def together(_):
    mgpu.warpgroup_barrier()

"""Joins the partial results of tokens whose keys were cut into work items, in place.

A program for every border between two parts, and for some heads: most find no token there that
begins before it, and are done.
"""

import functools
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ...._arrays.shard_map import traced_apart
from ..in_place import unfused
from .kernel_config import ROWS, VALUE_DIM, KernelConfig
from .split_kv import Schedule, item_at, last_part_of

WARPGROUPS = 4
HEADS = 4  # of one warpgroup
LAYOUT = plgpu.Layout.WG_STRIDED((VALUE_DIM,), 4)


class Arrays(NamedTuple):
    out: Any
    lse: Any
    part_out: Any
    part_lse: Any
    tokens: Any
    parts: Any


class State(NamedTuple):
    """Of one head: the largest lse so far, the sum of weights, and the weighted sum of results."""

    top: Any
    total: Any
    summed: Any


def merge(config: KernelConfig, schedule: Schedule, out, lse, part_out, part_lse):
    """out and lse, those of cut tokens from their work items."""
    if config.parts == 1:
        return out, lse
    chunks = config.num_heads // (WARPGROUPS * HEADS)
    mesh = plgpu.Mesh(
        grid=(config.parts - 1, chunks),
        grid_names=("part", "chunk"),
        num_threads=WARPGROUPS,
        thread_name="wg",
    )
    params = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)

    def in_place(refs):
        program = functools.partial(border, config, refs)
        run = pl.kernel(program, mesh=mesh, compiler_params=params)
        run()  # pyright: ignore[reportCallIssue]  (it takes the refs from its closure)

    arrays = out, lse, part_out, part_lse, *schedule
    kernel = unfused(lambda *arrays: pl.run_state(in_place)(Arrays(*arrays)))
    out, lse, *_ = traced_apart(kernel, *arrays)
    return out, lse


def border(config: KernelConfig, arrays: Arrays):
    part, schedule = lax.axis_index("part"), Schedule(arrays.tokens, arrays.parts)
    work_item = item_at(part, schedule.parts[part, 3] - 1, schedule, jnp.int32(0))
    goes_on = (work_item.slot == 2 * part + 1) & (schedule.parts[part, 3] > 0)

    @pl.when(goes_on)
    def cut():
        last = last_part_of(schedule, work_item.token)
        chunk = lax.axis_index("chunk") * WARPGROUPS + lax.axis_index("wg")
        heads = [chunk * HEADS + i for i in range(HEADS)]
        states = [piece_state(arrays, work_item.slot, head) for head in heads]
        at_once = config.joined_at_once
        step = functools.partial(join, arrays, heads, part, last, at_once)
        times = lax.div(last - part + (at_once - 1), jnp.int32(at_once))
        for head, state in zip(heads, lax.fori_loop(0, times, step, states), strict=True):
            store(arrays, work_item.token, head, state)


def piece_state(arrays: Arrays, slot, head) -> State:
    """A state that begins with one work item."""
    lse = arrays.part_lse[slot, lax.div(head, jnp.int32(ROWS)), lax.rem(head, jnp.int32(ROWS))]
    some = lse > -jnp.inf
    weight = jnp.where(some, 1.0, 0.0)
    return State(lse, weight, result(arrays, slot, head) * weight)


def result(arrays: Arrays, slot, head):
    high, low = (
        plgpu.layout_cast(arrays.part_out[i, slot, head], LAYOUT).astype(jnp.float32)
        for i in range(2)
    )
    return high + low


def join(arrays: Arrays, heads, part, last, at_once: int, i, states):
    """Some items more, each in the first slot of its part; the last may come twice, as nothing."""
    begin = part + 1 + i * at_once
    for k in range(at_once):
        slot = 2 * jnp.minimum(begin + k, last)
        new = [piece_state(arrays, slot, head) for head in heads]
        states = [joined(a, b, begin + k <= last) for a, b in zip(states, new, strict=True)]
    return states


def joined(a: State, b: State, wanted) -> State:
    b_top = jnp.where(wanted, b.top, -jnp.inf)
    top = jnp.maximum(a.top, b_top)
    base = jnp.where(top == -jnp.inf, 0.0, top)
    old, new = jnp.exp(a.top - base), jnp.exp(b_top - base)
    return State(top, a.total * old + b.total * new, a.summed * old + b.summed * new)


def store(arrays: Arrays, token, head, state: State):
    share = jnp.where(state.total > 0, 1 / jnp.where(state.total > 0, state.total, 1.0), 0.0)
    out = (state.summed * share).astype(arrays.out.dtype)
    arrays.out.at[token, head][...] = out
    tile, row = lax.div(head, jnp.int32(ROWS)), lax.rem(head, jnp.int32(ROWS))
    arrays.lse[token, tile, row] = state.top + jnp.log(state.total)

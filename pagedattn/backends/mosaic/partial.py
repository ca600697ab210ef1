"""Partial results of tiles whose keys were cut over several parts.

A part whose first piece belongs to a tile that begins in an earlier part leaves that piece's result
in memory. The part in which the tile begins waits for the results of the others, and joins them.
"""

import inspect

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from . import scores
from .scores import LAYOUT, Softmax
from .shape import Shape
from .tiles import has_rows

# JAX 0.10 must be given an index to load all of a reference, 0.11 warns of any, 0.12 takes none.
INDEX = inspect.signature(plgpu.load).parameters.get("idx")
ALL = ((),) if INDEX and INDEX.default is INDEX.empty else ()


def join_or_leave(shape: Shape, arrays, job, warpgroup, out, state: Softmax, store):
    """Stores the results of a tile that begins with a job, leaves those of another to its tile."""
    out, state = with_the_rest(shape, arrays, job, warpgroup, out, state)

    @pl.when(jnp.logical_not(job.piece.is_rest))
    def whole():
        store(out, state)

    @pl.when(job.piece.is_rest)
    def rest():
        leave(shape, arrays, job, warpgroup, out, state)


def leave(shape: Shape, arrays, job, warpgroup, out, state: Softmax):
    """Leaves the sums of a piece for the part in which its tile begins."""

    @pl.when(has_rows(shape, job.tile, warpgroup))
    def rows():
        place = job.piece.part, job.head, warpgroup
        arrays.part_out.at[place][...] = out
        for i, values in enumerate(state):
            arrays.part_state.at[*place, i][...] = values
        plgpu.commit_smem()  # all warps have written, before one of them says so
        plgpu.semaphore_signal(arrays.finished.at[place], memory_scope="gpu")


def with_the_rest(shape: Shape, arrays, job, warpgroup, out, state: Softmax):
    """The sums of a piece, and of those behind it if its tile goes on in other parts."""

    def join(part, carry):
        place = part, job.head, warpgroup
        plgpu.semaphore_wait(arrays.finished.at[place], memory_scope="gpu")
        top, total = (load(arrays.part_state.at[*place, i], LAYOUT.reduce(1)) for i in range(2))
        other_out = load(arrays.part_out.at[place], LAYOUT)
        out, state = carry
        return joined(out, state, other_out, Softmax(top, total))

    piece = job.piece
    waits = piece.goes_on & has_rows(shape, job.tile, warpgroup)
    end = jnp.where(waits, piece.last, piece.part) + 1
    return lax.fori_loop(piece.part + 1, end, join, (out, state))


def load(ref, layout):
    return plgpu.load(ref, *ALL, layout=layout, optimized=False)


def joined(out, state: Softmax, other_out, other: Softmax):
    top = jnp.maximum(state.top, other.top)
    base = jnp.where(top == -jnp.inf, 0.0, top)
    here, there = jnp.exp2(state.top - base), jnp.exp2(other.top - base)
    out = out * scores.wide(here, out) + other_out * scores.wide(there, out)
    return out, Softmax(top, state.total * here + other.total * there)

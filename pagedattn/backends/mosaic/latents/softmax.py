"""The running softmax, in base 2."""

import math
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .shape import ROWS, Shape

LAYOUT = plgpu.Layout.WGMMA
LOG2_E = math.log2(math.e)
SLACK = 8.0  # by which logits may exceed the top before there is a new one


class State(NamedTuple):
    """Of each row: about the largest logit so far, and a sum of weights relative to it."""

    top: Any
    total: Any


def row_vector(value):
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), LAYOUT.reduce(1))


def wide(rows, like):
    """One value for each row as a matrix."""
    return lax.broadcast_in_dim(rows, like.shape, [0])


def finite(top):
    return jnp.where(top == -jnp.inf, 0.0, top)


def kept(before, top):
    """By what sums shrink when the largest logit changes."""
    return jnp.exp2(before - finite(top))


def weigh(shape: Shape, x, state: State):
    """The weights of dot products, the new top, and by what earlier sums shrink.

    A top stays while logits exceed it by little: weights are then above 1, and no sum shrinks.
    """
    factor = shape.scale * LOG2_E
    if factor <= 0:
        x, factor = jnp.where(x == -jnp.inf, x, x * factor), 1.0
    largest = x.max(axis=1) * factor
    top = jnp.where(largest > state.top + SLACK, largest, state.top)
    shrunk = kept(state.top, top)
    weights = jnp.exp2(x * factor - wide(finite(top), x))
    return weights, State(top, state.total), shrunk

"""Mixtures of experts: a router weighs a few of many MLPs for each token.

Only chosen experts are computed. Tokens are sorted by expert into tiles of rows, each of which is
of one expert, and a loop goes over the tiles there are: weights that no token asks for are not
even read. (`jax.lax.ragged_dot` would say the same in one call, but without a kernel of its own, as
on CPUs, XLA multiplies every row by every expert's weights.)
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pagedattn.extend import cdiv

from .pieces import Features, gated_mlp, linear

GATED = ("gate", "up", "down")
FEWEST_ROWS = 8  # of a tile; fewer would not be multiplied any faster


class Routed(NamedTuple):
    """The experts of each token, and what their results count."""

    experts: Int[Array, "num_tokens top_k"]
    weights: Float[Array, "num_tokens top_k"]


class Tiles(NamedTuple):
    """Where the tokens of each expert stand.

    Fields:
      slots: of each token and choice, its row among those of all tiles.
      experts: the expert of each tile.
      count: how many tiles there are; the others are empty.
    """

    slots: Int[Array, "num_tokens top_k"]
    experts: Int[Array, " most_tiles"]
    count: Int[Array, ""]


def each_expert(names: Mapping[str, str], count: int) -> dict[str, tuple[str, ...]]:
    """A tensor's names in all experts, whose numbers stand for the braces in `names`."""
    return {ours: tuple(theirs.format(e) for e in range(count)) for ours, theirs in names.items()}


def route(layer: dict, x: Features, top_k: int, normalised: bool) -> Routed:
    """The likeliest experts by the layer's router, and their probabilities in float32.

    Normalised, these sum to 1, which is the softmax of the likeliest alone.
    """
    likely = jax.nn.softmax(linear(layer, "router", x).astype(jnp.float32))
    weights, experts = jax.lax.top_k(likely, top_k)
    return Routed(experts, weights / weights.sum(-1, keepdims=True) if normalised else weights)


def tiles_of(experts: Int[Array, "num_tokens top_k"], num_experts: int, rows: int) -> Tiles:
    """Tiles of so many rows, those of one expert side by side, in the order of the experts."""
    chosen = jax.nn.one_hot(experts.ravel(), num_experts, dtype=jnp.int32)
    before = ((jnp.cumsum(chosen, axis=0) - chosen) * chosen).sum(axis=1)  # of the same expert
    tiles = cdiv(chosen.sum(axis=0), rows)
    first = jnp.cumsum(tiles) - tiles
    most = experts.size // rows + min(num_experts, experts.size)
    order = jnp.repeat(jnp.arange(num_experts), tiles, total_repeat_length=most)
    slots = first[experts] * rows + before.reshape(experts.shape)
    return Tiles(slots, order, tiles.sum())


def mixture(
    layer: dict,
    x: Features,
    routed: Routed,
    names: tuple[str, ...],
    expert: Callable[[dict, Features], Features],
) -> Features:
    """The weighted sum of `expert(weights, x)`, where `names` are the layer's stacked weights."""
    stacked = {name: layer[name] for name in names}
    num_experts = len(stacked[names[0]])
    rows = max(FEWEST_ROWS, cdiv(routed.experts.size, num_experts))  # what they get on average
    tiles = tiles_of(routed.experts, num_experts, rows)
    inputs = jnp.zeros((len(tiles.experts) * rows, x.shape[1]), x.dtype)
    inputs = inputs.at[tiles.slots].set(x[:, None])

    def compute(tile, values):  # a tile's results in place of its inputs
        own = jax.tree.map(lambda each: each[tiles.experts[tile]], stacked)
        new = expert(own, jax.lax.dynamic_slice_in_dim(values, tile * rows, rows))
        return jax.lax.dynamic_update_slice_in_dim(values, new, tile * rows, 0)

    values = jax.lax.fori_loop(0, tiles.count, compute, inputs)
    return jnp.einsum("tk,tkh->th", routed.weights.astype(x.dtype), values[tiles.slots])


def gated_experts(layer: dict, x: Features, routed: Routed) -> Features:
    """The mixture of MLPs such as Llama's."""
    return mixture(layer, x, routed, GATED, partial(gated_mlp, activation=jax.nn.silu))

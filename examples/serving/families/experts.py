"""Mixtures of experts: a router weighs a few of many MLPs for each token.

Every expert is computed for every token, and most results get weight 0: so shapes are static, and
nothing is sorted. A fast engine would sort tokens by expert, for `jax.lax.ragged_dot`.
"""

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .pieces import Features, gated_mlp, linear

GATED = ("gate", "up", "down")
Weights = Float[Array, "num_tokens num_experts"]


def each_expert(names: Mapping[str, str], count: int) -> dict[str, tuple[str, ...]]:
    """A tensor's names in all experts, whose numbers stand for the braces in `names`."""
    return {ours: tuple(theirs.format(e) for e in range(count)) for ours, theirs in names.items()}


def route(logits: Weights, top_k: int, normalised: bool) -> Weights:
    """The experts' weights in float32: their probabilities, 0 but for the `top_k` likeliest.

    Normalised, they sum to 1, which is the softmax of the likeliest alone.
    """
    likely, chosen = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32)), top_k)
    likely = likely / likely.sum(axis=-1, keepdims=True) if normalised else likely
    return jnp.einsum("tk,tke->te", likely, jax.nn.one_hot(chosen, logits.shape[-1]))


def mixture(
    layer: dict,
    x: Features,
    top_k: int,
    normalised: bool,
    names: tuple[str, ...],
    expert: Callable[[dict, Features], Features],
) -> Features:
    """The weighted sum of `expert(weights, x)`, where `names` are the layer's stacked weights."""
    weights = route(linear(layer, "router", x), top_k, normalised)
    stacked = {name: layer[name] for name in names}
    outputs = jax.vmap(expert, in_axes=(0, None))(stacked, x)
    return jnp.einsum("te,eth->th", weights.astype(x.dtype), outputs)


def gated_experts(layer: dict, x: Features, top_k: int, normalised: bool) -> Features:
    """The mixture of MLPs such as Llama's."""
    return mixture(layer, x, top_k, normalised, GATED, partial(gated_mlp, activation=jax.nn.silu))

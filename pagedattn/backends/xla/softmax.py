"""The online softmax of Milakov & Gimelshein (2018) and Rabe & Staats (2021), chunk by chunk."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class State(NamedTuple):
    """A partial softmax: highest logit, sum of exponentials, weighted sum of values."""

    highest: Float[Array, "step kv_heads rows"]
    total: Float[Array, "step kv_heads rows"]
    summed: Float[Array, "step kv_heads rows value_dim"]


def no_key_seen(scaled: Float[Array, "step kv_heads rows head_dim"], value_dim: int) -> State:
    empty = jnp.zeros_like(scaled[..., 0])
    summed = jnp.broadcast_to(empty[..., None], (*empty.shape, value_dim))
    return State(jnp.full_like(empty, -jnp.inf), empty, summed)


def accumulate(
    state: State,
    logits: Float[Array, "step kv_heads rows chunk"],
    value: Float[Array, "step kv_heads chunk value_dim"],
) -> State:
    # The shift cancels out of the result, so it needs no gradient.
    highest = jax.lax.stop_gradient(jnp.maximum(state.highest, logits.max(axis=3)))
    shift = jnp.where(jnp.isneginf(highest), 0, highest)
    weights = jnp.exp(logits - shift[..., None])
    kept = jnp.exp(state.highest - shift)
    total = state.total * kept + weights.sum(axis=3)
    summed = jnp.einsum("bhrk,bhkd->bhrd", weights, value, precision="highest")
    return State(highest, total, state.summed * kept[..., None] + summed)


def finish(
    state: State, dtype, shape: tuple[int, ...]
) -> tuple[Float[Array, "step tile num_heads value_dim"], Float[Array, "step tile num_heads"]]:
    """Normalises, and turns rows back into tokens and heads."""
    step, tile = shape
    empty = state.total == 0
    total = jnp.where(empty, 1, state.total)
    lse = jnp.where(empty, -jnp.inf, state.highest + jnp.log(total)).astype(jnp.float32)
    out = (state.summed / total[..., None]).astype(dtype)
    out = out.reshape(step, -1, tile, out.shape[3]).swapaxes(1, 2)
    return out, lse.reshape(step, -1, tile).swapaxes(1, 2)

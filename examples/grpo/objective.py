"""Group-relative policy optimization (GRPO, Shao et al. 2024): advantages, and one update."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from pagedattn_serving.families.forward import cached_attention, forward_paged
from pagedattn_serving.families.llama import Llama

from pagedattn import make_batch

from .policy import Policy

CLIP = 0.2  # of the ratio of probabilities

Tokens = Int[Array | np.ndarray, "num_samples length_plus_1"]
PerToken = Float[Array | np.ndarray, "num_samples length"]


def advantages(rewards: Float[np.ndarray, "groups samples"]) -> Float[np.ndarray, " num_samples"]:
    """How much better than its group each sample is, in standard deviations."""
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return (centred / (rewards.std(axis=1, keepdims=True) + 1e-4)).ravel()


@partial(jax.jit, static_argnames=("model", "rows", "batch_invariant", "backend"))
def logprobs(
    params: dict,
    model: Llama,
    tokens: Tokens,
    rows: int,
    batch_invariant: bool,
    backend: str | None = None,
) -> PerToken:
    """The log-probability of each token but the first, `rows` tokens a forward pass.

    A product's bits follow from its number of rows: with as many as in a step of the engine, and
    batch-invariant attention, these log-probabilities are those that the engine gives.
    """
    num_samples, length = tokens.shape[0], tokens.shape[1] - 1
    together = rows // length
    tables = np.arange(together)[:, None]  # a block for each sequence
    new, old = [length] * together, [0] * together
    batch = make_batch(new, old, tables, block_size=length, pad_tokens=rows)
    caches = [model.init_cache(together, length, jnp.float32) for _ in params["layers"]]
    attend = partial(cached_attention, batch_invariant=batch_invariant)

    def forward(fed):
        padded = jnp.pad(fed.ravel(), (0, rows - fed.size))
        hidden, _ = forward_paged(params, model, padded, caches, batch, backend, attend)
        scores = jax.nn.log_softmax(model.logits(params, hidden))
        return scores[: fed.size].reshape(together, length, -1)

    filled = jnp.pad(tokens, ((0, -num_samples % together), (0, 0)))
    fed = filled[:, :-1].reshape(-1, together, length)
    scores = jax.lax.map(forward, fed).reshape(-1, length, model.vocab_size)[:num_samples]
    return jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]


@partial(nnx.jit, static_argnames=("model", "rows"), donate_argnames=("policy", "optimizer"))
def update(
    policy: Policy,
    optimizer: nnx.Optimizer,
    model: Llama,
    tokens: Tokens,
    sampled: PerToken,
    scored: PerToken,
    advantage: Float[Array | np.ndarray, " num_samples"],
    rows: int,
) -> None:
    """One step, in place.

    `scored` are the policy's own log-probabilities. XLA rounds otherwise in a program that also has
    gradients, so the pass here gives those alone, and the ratio is 1 where scored is sampled.
    """

    def loss(policy: Policy):
        live = logprobs(policy.arrays, model, tokens, rows, batch_invariant=True, backend="xla")
        ratio = jnp.exp((scored - sampled) + (live - jax.lax.stop_gradient(live)))
        clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
        return -jnp.minimum(ratio * advantage[:, None], clipped * advantage[:, None]).mean()

    optimizer.update(policy, nnx.grad(loss)(policy))

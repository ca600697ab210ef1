"""Choosing the next token: the likeliest, or one at random, reproducibly."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pagedattn import InvalidInputError
from serving.request import Choice, Group, Sequence, Streamed

MAX_LOGPROBS = 20  # a request may ask for the likeliest tokens, up to so many


def pick(
    logits: Float[Array, " vocab_size"],
    seed: Int[Array, ""],
    sample: Int[Array, ""],
    position: Int[Array, ""],
    temperature: Float[Array, ""],
) -> Int[Array, ""]:
    """The token that follows: the likeliest at temperature 0, else drawn from the softmax.

    The noise depends only on the request's seed, the number of the sample and the token's position.
    So a text is the same whether it is served alone or in any batch, with preemption or without.
    Adding Gumbel noise and taking the largest draws from the softmax (the Gumbel-max trick).
    """
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sample), position)
    noise = jax.random.gumbel(key, logits.shape, logits.dtype)
    return jnp.argmax(logits + temperature * noise).astype(jnp.int32)


def narrowed(
    logits: Float[Array, " vocab_size"],
    temperature: Float[Array, ""],
    top_k: Int[Array, ""],
    top_p: Float[Array, ""],
) -> Float[Array, " vocab_size"]:
    """The logits of the tokens that may be drawn, and -inf for the others.

    First the `top_k` likeliest stay; then of these the fewest, likeliest first, whose probabilities
    at the temperature come to `top_p` of theirs together. Tokens as likely as the last of them stay
    too, and so does always the likeliest.
    """
    down, rank = jnp.sort(logits, descending=True), jnp.arange(len(logits))
    warmth = jnp.where(temperature > 0, temperature, 1)
    kept = jax.nn.softmax(jnp.where(rank < top_k, down / warmth, -jnp.inf))
    stays = (rank < top_k) & ((jnp.cumsum(kept) - kept < top_p) | (top_p >= 1))
    return jnp.where(logits >= down[stays.sum() - 1], logits, -jnp.inf)


def likeliest(
    logits: Float[Array, " vocab_size"], chosen: Int[Array, ""], count: int
) -> tuple[Float[Array, ""], Int[Array, " count"], Float[Array, " count"]]:
    """The chosen token's log-probability; the `count` likeliest tokens, and theirs."""
    logprobs = jax.nn.log_softmax(logits)
    top, tokens = jax.lax.top_k(logprobs, count)
    return logprobs[chosen], tokens, top


pick_jit, narrowed_jit = jax.jit(pick), jax.jit(narrowed)
likeliest_jit = jax.jit(likeliest, static_argnames="count")


@dataclass(frozen=True)
class Sampling:
    """`num_samples` independent completions; they share the prompt's blocks.

    Fields:
      temperature: 0 takes the likeliest token, whatever `top_k` and `top_p` are.
      num_samples: how many completions.
      seed: of the noise, from 0 to 2 ** 31 - 1; the same seed gives the same completions.
      top_k: draw from the `top_k` likeliest tokens alone; None for all.
      top_p: draw from the likeliest tokens alone whose probabilities come to `top_p`; 1 for all.
      logprobs: hand out each token's log-probability and those of so many likeliest tokens, from 0
        to `MAX_LOGPROBS`; None for neither.

    Raises:
      InvalidInputError: A value is out of its range.
    """

    temperature: float = 0.0
    num_samples: int = 1
    seed: int = 0
    top_k: int | None = None
    top_p: float = 1.0
    logprobs: int | None = None

    def __post_init__(self):
        require = {
            "temperature": 0 <= self.temperature < math.inf,
            "num_samples": self.num_samples >= 1,
            "seed": 0 <= self.seed < 1 << 31,
            "top_k": self.top_k is None or self.top_k >= 1,
            "top_p": 0 < self.top_p <= 1,
            "logprobs": self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
        }
        if wrong := [name for name, holds in require.items() if not holds]:
            got = ", ".join(f"{name}={getattr(self, name)}" for name in wrong)
            raise InvalidInputError(f"out of range: {got}; the fields of Sampling say the ranges")

    @property
    def width(self) -> int:
        return self.num_samples

    def choose(self, group: Group, stop_tokens: tuple[int, ...]) -> list[Choice]:
        first = not group.completion(group.sequences[0])
        samples = range(self.num_samples) if first else [s.sample for s in group.sequences]
        return [
            self._chosen(group.sequences[0 if first else i], 0 if first else i, sample, stop_tokens)
            for i, sample in enumerate(samples)
        ]

    def settled(self, group: Group, choices: list[Choice]) -> list[Streamed]:
        """Every token, as soon as it is drawn."""
        return [
            Streamed(
                group.request.id, c.token, c.sample, c.final, c.reason, c.logprob, c.top_logprobs
            )
            for c in choices
        ]

    def ranked(self, group: Group) -> list[Sequence]:
        return sorted(group.finished, key=lambda sequence: sequence.sample)

    def _chosen(self, sequence: Sequence, parent: int, sample: int, stop_tokens) -> Choice:
        token = self._pick(sequence, sample)
        reason = "stop" if token in stop_tokens else None
        choice = Choice(parent, token, sample, reason=reason)
        if self.logprobs is None:
            return choice
        count = min(MAX_LOGPROBS, len(sequence.logits))
        logprob, tokens, top = likeliest_jit(sequence.logits, token, count)
        top = zip(tokens.tolist(), top.tolist(), strict=True)
        return choice._replace(logprob=float(logprob), top_logprobs=tuple(top)[: self.logprobs])

    def _pick(self, sequence: Sequence, sample: int) -> int:
        if not self.temperature:
            return int(np.argmax(sequence.logits))
        noise, logits = (self.seed, sample, len(sequence.tokens)), sequence.logits
        if self.top_k is not None or self.top_p < 1:
            top_k = min(self.top_k or len(logits), len(logits))
            logits = narrowed_jit(logits, self.temperature, top_k, self.top_p)
        return int(pick_jit(logits, *noise, self.temperature))


GREEDY = Sampling()

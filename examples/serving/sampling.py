"""Choosing the next token: the likeliest, or one at random, reproducibly."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from serving.request import Choice, Group, Sequence


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


pick_jit = jax.jit(pick)


@dataclass(frozen=True)
class Sampling:
    """`num_samples` independent completions; they share the prompt's blocks."""

    temperature: float = 0.0  # 0 takes the likeliest token
    num_samples: int = 1
    seed: int = 0

    @property
    def width(self) -> int:
        return self.num_samples

    def choose(self, group: Group, stop_tokens: tuple[int, ...]) -> list[Choice]:
        first = not group.completion(group.sequences[0])
        samples = range(self.num_samples) if first else [s.sample for s in group.sequences]
        choices = []
        for index, sample in enumerate(samples):
            parent = 0 if first else index
            token = self._pick(group.sequences[parent], sample)
            choices.append(Choice(parent, token, sample, final=token in stop_tokens))
        return choices

    def settled(self, group: Group, choices: list[Choice]) -> list[tuple[int, int]]:
        """Every token, as soon as it is drawn."""
        del group
        return [(choice.sample, choice.token) for choice in choices]

    def ranked(self, group: Group) -> list[Sequence]:
        return sorted(group.finished, key=lambda sequence: sequence.sample)

    def _pick(self, sequence: Sequence, sample: int) -> int:
        if not self.temperature:
            return int(np.argmax(sequence.logits))
        noise = (self.seed, sample, len(sequence.tokens))
        return int(pick_jit(sequence.logits, *noise, self.temperature))


GREEDY = Sampling()

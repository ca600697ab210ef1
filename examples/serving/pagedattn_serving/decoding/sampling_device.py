"""Choosing next tokens on the device: the likeliest, or one at random, reproducibly.

Each row has settings of its own, as arrays, so that one program serves every mix of them. What no
row of a step asks for is not computed: whether any does is known on the host.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from pagedattn_serving.decoding.request import NO_TOKEN, Draw, Found, Settings

AllLogits = Float[Array, "rows vocab_size"]
Ints = Int[Array, " rows"]
Floats = Float[Array, " rows"]


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
    return unless_nan(logits, jnp.argmax(logits + temperature * noise))


def unless_nan(
    logits: Float[Array, "*rows vocab_size"], tokens: Int[Array, "*rows"]
) -> Int[Array, "*rows"]:
    """The tokens; `NO_TOKEN` where a logit is NaN, which argmax takes for the largest."""
    return jnp.where(jnp.isnan(logits.max(axis=-1)), NO_TOKEN, tokens).astype(jnp.int32)


def narrowed(
    logits: Float[Array, " vocab_size"],
    temperature: Float[Array, ""],
    top_k: Int[Array, ""],
    top_p: Float[Array, ""],
) -> Float[Array, " vocab_size"]:
    """The logits of the tokens that may be drawn, and -inf for the others.

    First the `top_k` likeliest stay; then of these the fewest, likeliest first, whose probabilities
    at the temperature come to `top_p` of theirs together. Both times those as likely as the last
    stay too, and the likeliest always does. So does NaN.
    """
    order = in_order(logits)
    kept = order >= cut(order, jnp.ones_like(logits), top_k)
    warmth = jnp.where(temperature > 0, temperature, 1)
    shares = jax.nn.softmax(jnp.where(kept, logits / warmth, -jnp.inf))
    # A top_p too small for a float32 is rounded to 0; the likeliest token is kept all the same.
    enough = jnp.minimum(cut(order, shares, top_p * shares.sum()), order.max())
    stays = kept & ((order >= enough) | (top_p >= 1)) | jnp.isnan(logits)
    return jnp.where(stays, logits, -jnp.inf)


def cut(
    order: UInt32[Array, " vocab_size"],
    weights: Float[Array, " vocab_size"],
    target: Float[Array, ""] | Int[Array, ""],
) -> UInt32[Array, ""]:
    """The largest c for which the weights of all entries `order >= c` come to the target.

    Found bit by bit: a GPU adds up a vocabulary 32 times in less time than it sorts it.
    """

    def with_bit(index, found):
        tried = found | (jnp.uint32(1 << 31) >> index)
        return jnp.where(jnp.where(order >= tried, weights, 0).sum() >= target, tried, found)

    return jax.lax.fori_loop(jnp.uint32(0), jnp.uint32(32), with_bit, jnp.uint32(0))


def in_order(values: Float[Array, " n"]) -> UInt32[Array, " n"]:
    """Integers in the order of the values, of which 0 and -0 are one."""
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0, values), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def likeliest(
    logprobs: Float[Array, " vocab_size"], chosen: Int[Array, ""], count: int
) -> tuple[Float[Array, ""], Int[Array, " count"], Float[Array, " count"]]:
    """The chosen token's log-probability; the `count` likeliest tokens, and theirs."""
    top, tokens = jax.lax.top_k(logprobs, count)
    return logprobs[chosen], tokens, top


@jax.jit
def greedy_rows(logits: AllLogits) -> Ints:
    return unless_nan(logits, jnp.argmax(logits, axis=-1))


@jax.jit
def pick_rows(
    logits: AllLogits, seeds: Ints, samples: Ints, positions: Ints, temperatures: Floats
) -> Ints:
    return jax.vmap(pick)(logits, seeds, samples, positions, temperatures)


@jax.jit
def narrow_rows(logits: AllLogits, temperatures: Floats, top_ks: Ints, top_ps: Floats) -> AllLogits:
    return jax.vmap(narrowed)(logits, temperatures, top_ks, top_ps)


@jax.jit
def logprobs_rows(logits: AllLogits) -> AllLogits:
    """A program of its own, for the one after it differs by `count`, which others may ask for."""
    return jax.nn.log_softmax(logits)


@partial(jax.jit, static_argnames="count")
def likeliest_rows(logprobs: AllLogits, chosen: Ints, count: int):
    return jax.vmap(partial(likeliest, count=count))(logprobs, chosen)


@jax.jit
def ban(logits: AllLogits, rows: Int[Array, " pairs"], tokens: Int[Array, " pairs"]) -> AllLogits:
    """-inf at (row, token) pairs; NaN stays, and what is out of range changes nothing."""
    return logits.at[rows, tokens].min(-jnp.inf, mode="drop")


class Drawn(NamedTuple):
    """What the device chooses for draws; the copies to the host are under way.

    Fields:
      tokens: of each row of the pool, on the device; anything for a row without a draw.
      likeliest: the results of `likeliest` by row, if any draw asks for them.
    """

    draws: list[Draw]
    tokens: Ints
    likeliest: tuple[Floats, Int[Array, "rows count"], Float[Array, "rows count"]] | None

    def read(self) -> list[Found]:
        """What was found for each draw; waits for the device."""
        tokens = np.asarray(self.tokens).tolist()
        if self.likeliest is None:
            return [Found(tokens[draw.row]) for draw in self.draws]
        logprobs, top, top_logprobs = (np.asarray(array).tolist() for array in self.likeliest)
        scored = [tuple(zip(*row, strict=True)) for row in zip(top, top_logprobs, strict=True)]
        return [Found(tokens[d.row], logprobs[d.row], scored[d.row]) for d in self.draws]


def enqueue(logits: AllLogits, draws: list[Draw]) -> Drawn:
    """Has the device choose a token for each draw, from the logits of its row."""
    settings = [draw.group.request.decoding.settings for draw in draws]
    tokens, scores = choose(without_banned(logits, draws), draws, settings), None
    if any(s.scored for s in settings):
        count = min(power_of_two(max(s.num_top for s in settings)), logits.shape[1])
        scores = likeliest_rows(logprobs_rows(logits), tokens, count)
    jax.tree.map(lambda array: array.copy_to_host_async(), (tokens, scores))
    return Drawn(draws, tokens, scores)


def without_banned(logits: AllLogits, draws: list[Draw]) -> AllLogits:
    """The logits, -inf for tokens that a draw must not give."""
    pairs = [(draw.row, token) for draw in draws for token in draw.banned]
    if not pairs:
        return logits
    nowhere = (logits.shape[0], 0)
    padded = pairs + [nowhere] * (power_of_two(len(pairs)) - len(pairs))
    rows, tokens = np.array(padded, np.int32).T
    return ban(logits, rows, tokens)


def choose(logits: AllLogits, draws: list[Draw], settings: list[Settings]) -> Ints:
    """The tokens by row; what no draw asks for is not run."""
    num_rows, vocab_size = logits.shape
    by_row = partial(spread, [draw.row for draw in draws], num_rows)
    temperatures = by_row([s.temperature for s in settings], np.float32)
    if not temperatures.any():
        return greedy_rows(logits)
    if any(s.narrows for s in settings):
        top_ks = by_row([min(s.top_k or vocab_size, vocab_size) for s in settings])
        top_ps = by_row([s.top_p for s in settings], np.float32)
        logits = narrow_rows(logits, temperatures, top_ks, top_ps)
    seeds, positions = by_row([s.seed for s in settings]), by_row([d.position for d in draws])
    samples = by_row([draw.sequence.sample for draw in draws])
    return pick_rows(logits, seeds, samples, positions, temperatures)


def spread(rows: list[int], num_rows: int, values: list, dtype: type = np.int32) -> np.ndarray:
    """The values at their rows, 0 elsewhere."""
    array = np.zeros(num_rows, dtype)
    array[rows] = values
    return array


def power_of_two(count: int) -> int:
    """The next one, so that few programs serve all counts."""
    return 1 << max(count - 1, 0).bit_length()

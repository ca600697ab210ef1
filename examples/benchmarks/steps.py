"""A decode loop over a cache that is full already: its time a step, and what it has to read."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import NamedTuple

import jax
import jax.numpy as jnp
from serving.decoder import Decoder
from serving.generation import Generation, decode_loop

from benchmarks.decodes import BLOCK_SIZE, random_cache
from pagedattn import BlockPool, append_tokens, init_block_pool
from pagedattn.extend import cdiv

WARM_UP = 2  # steps, of which the first compiles


def filled(model: Decoder, params: dict, lengths: list[int], new_tokens: int) -> Generation:
    """Sequences with so many cached tokens each, of random keys and values in scattered blocks."""
    num_seqs, max_blocks = len(lengths), cdiv(max(lengths) + new_tokens + 1, BLOCK_SIZE)
    num_blocks = sum(cdiv(length + new_tokens + 1, BLOCK_SIZE) for length in lengths)
    cached = jnp.array(lengths, jnp.int32)
    pool = scattered_pool(cached, num_blocks, max_blocks)
    layers = range(model.num_hidden_layers)
    shape = (num_blocks, BLOCK_SIZE, model.num_key_value_heads, model.head_dim)
    return Generation(
        pool=pool,
        caches=[random_cache(shape, params["embedding"].dtype, seed=layer) for layer in layers],
        tokens=jnp.zeros((num_seqs, max(lengths) + new_tokens + 1), jnp.int32),
        lengths=cached + 1,
        ends=cached + 1 + new_tokens,
        live=jnp.ones(num_seqs, bool),
        starved=jnp.zeros(num_seqs, bool),
        seeds=jnp.zeros(num_seqs, jnp.int32),
    )


@partial(jax.jit, static_argnums=(1, 2))
def scattered_pool(lengths, num_blocks: int, max_blocks: int) -> BlockPool:
    pool = init_block_pool(num_blocks, BLOCK_SIZE, max_seqs=len(lengths), max_blocks=max_blocks)
    order = jax.random.permutation(jax.random.key(2), num_blocks).astype(jnp.int32)
    return append_tokens(replace(pool, free_blocks=order), lengths)[0]


def seconds_a_step(
    model: Decoder, params: dict, lengths: list[int], steps: int, backend: str | None, runs: int = 3
) -> float:
    """Of `decode_loop` taking the likeliest tokens: the median of some runs of so many steps."""
    state = filled(model, params, lengths, WARM_UP + runs * steps)
    run = partial(decode_loop, params, model, temperature=None, backend=backend)
    state = run(state=state, max_steps=WARM_UP)  # called as it is timed, or JAX compiles it again
    seconds, state = median_of_runs(partial(run, max_steps=steps), state, runs)
    if not bool(state.lengths.sum() == state.ends.sum()):
        raise RuntimeError("a sequence ended early, so that steps were not of the whole batch")
    return seconds / steps


def median_of_runs(
    run: Callable[..., Generation], state: Generation, runs: int
) -> tuple[float, Generation]:
    """Seconds of `run(state=state)`, which goes on from one run to the next, and the last state."""
    times, state = [], jax.block_until_ready(state)
    for _ in range(runs):
        start = time.perf_counter()
        state = jax.block_until_ready(run(state=state))
        times.append(time.perf_counter() - start)
    return median(times), state


class Needs(NamedTuple):
    """What a decode step cannot do without."""

    weight_bytes: int  # of all weights that are read
    cache_bytes: int  # of the cached keys and values
    operations: int  # floating-point, of the products with the weights

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes

    def roofline(self, bytes_s: float, operations_s: float) -> float:
        """Seconds at best: products read weights while they compute, attention comes between."""
        products = max(self.weight_bytes / bytes_s, self.operations / operations_s)
        return products + self.cache_bytes / bytes_s


def needs_of_a_step(model: Decoder, params: dict, lengths: list[int]) -> Needs:
    """A step of sequences with so many cached tokens each."""
    table = params["embedding"]
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if "lm_head" in params:  # then only a row a sequence of the embedding is read
        weights -= table.nbytes
    token = 2 * model.num_key_value_heads * model.head_dim * table.dtype.itemsize
    return Needs(
        weight_bytes=weights,
        cache_bytes=sum(lengths) * token * model.num_hidden_layers,
        operations=2 * len(lengths) * weights // table.dtype.itemsize,
    )

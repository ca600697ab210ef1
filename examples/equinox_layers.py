"""Equinox: attention layers over a paged cache, scanned, every other one with a window.

    python examples/equinox_layers.py

A batch grows from one sequence to four. Exit status 1: an output differs from float64 by more than
rounding, or the cache was copied instead of updated.
"""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from layers.growing import advance
from layers.judge import judge, weights_of
from layers.sizes import HEAD_DIM, NUM_BLOCKS, NUM_HEADS, NUM_KV_HEADS, NUM_PAIRS, SIZE, SPECS
from layers.stacked import batch_of_layer

from pagedattn import AttentionSpec, paged_attention, write_kv


class Attention(eqx.Module):
    """Grouped-query attention with a residual connection."""

    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    output: eqx.nn.Linear
    spec: AttentionSpec = eqx.field(static=True)

    def __init__(self, spec: AttentionSpec, key):
        linear, keys = partial(eqx.nn.Linear, use_bias=False), jax.random.split(key, 4)
        self.spec = spec
        self.query = linear(SIZE, NUM_HEADS * HEAD_DIM, key=keys[0])
        self.key = linear(SIZE, NUM_KV_HEADS * HEAD_DIM, key=keys[1])
        self.value = linear(SIZE, NUM_KV_HEADS * HEAD_DIM, key=keys[2])
        self.output = linear(NUM_HEADS * HEAD_DIM, SIZE, key=keys[3])

    def __call__(self, x, cache, batch):
        projections = (self.query, self.key, self.value)
        query, key, value = (jax.vmap(p)(x).reshape(len(x), -1, HEAD_DIM) for p in projections)
        cache = write_kv(cache, key, value, batch.slot_mapping)
        out = paged_attention(query, cache, batch, self.spec)
        return x + jax.vmap(self.output)(out.reshape(len(x), -1)), cache


def make_pair(key) -> tuple[Attention, ...]:
    """What a scan repeats is the same each time, so it repeats one layer of each kind."""
    return tuple(map(Attention, SPECS, jax.random.split(key, len(SPECS))))


def decoder(pair: tuple[Attention, ...], x, cache, batch):
    """All layers, one pair after the other; the weights of the pairs are stacked."""
    stacked, rest = eqx.partition(pair, eqx.is_array)

    def through(carry, of_pair):
        weights, index = of_pair
        for offset, layer in enumerate(eqx.combine(weights, rest)):
            own = batch_of_layer(batch, index * len(SPECS) + offset, NUM_BLOCKS)
            carry = layer(*carry, own)
        return carry, None

    return jax.lax.scan(through, (x, cache), (stacked, jnp.arange(NUM_PAIRS)))[0]


@partial(eqx.filter_jit, donate="all-except-first")
def step(pair: tuple[Attention, ...], cache, pool, x, new, max_query_len: int):
    return advance(partial(decoder, pair), cache, pool, x, new, max_query_len)


def main() -> int:
    pair = eqx.filter_vmap(make_pair)(jax.random.split(jax.random.key(0), NUM_PAIRS))
    weights = weights_of(pair, lambda linear: linear.weight.swapaxes(1, 2))
    return judge(partial(step, pair), weights)


if __name__ == "__main__":
    raise SystemExit(main())

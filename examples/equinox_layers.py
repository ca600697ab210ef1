"""Equinox: attention layers over a paged cache, scanned, every other one with a window.

    python examples/equinox_layers.py

A batch grows from one sequence to four. Every output is compared with the float64 oracle; the exit
status is 1 if one differs by more than rounding, or if the cache was copied instead of updated.
"""

import sys
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from layers.growing import advance
from layers.judge import Weights, judge
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


class Pair(eqx.Module):
    """What a scan repeats is the same each time, so it repeats one layer of each kind."""

    layers: tuple[Attention, ...]

    def __init__(self, key):
        keys = jax.random.split(key, len(SPECS))
        self.layers = tuple(map(Attention, SPECS, keys))

    def __call__(self, x, cache, batch, index):
        for offset, layer in enumerate(self.layers):
            own = batch_of_layer(batch, index * len(SPECS) + offset, NUM_BLOCKS)
            x, cache = layer(x, cache, own)
        return x, cache


class Decoder(eqx.Module):
    """Pairs of layers, their weights stacked."""

    pairs: Pair

    def __init__(self, key):
        self.pairs = eqx.filter_vmap(Pair)(jax.random.split(key, NUM_PAIRS))

    def __call__(self, x, cache, batch):
        weights, rest = eqx.partition(self.pairs, eqx.is_array)

        def through(carry, layer):
            pair = eqx.combine(layer[0], rest)
            return pair(*carry, batch, layer[1]), None

        layers = weights, jnp.arange(NUM_PAIRS)
        return jax.lax.scan(through, (x, cache), layers)[0]


@partial(eqx.filter_jit, donate="all-except-first")
def step(model: Decoder, cache, pool, x, new, max_query_len: int):
    return advance(model, cache, pool, x, new, max_query_len)


def weights_of(model: Decoder) -> Weights:
    names = ("query", "key", "value", "output")
    return [
        {name: np.asarray(getattr(layer, name).weight[index]).T for name in names}
        for index in range(NUM_PAIRS)
        for layer in model.pairs.layers
    ]


def main() -> int:
    model = Decoder(jax.random.key(0))
    return judge(partial(step, model), weights_of(model))


if __name__ == "__main__":
    sys.exit(main())

"""Flax NNX: attention layers over a paged cache, scanned, every other one with a window.

    python examples/flax_layers.py

A batch grows from one sequence to four. Exit status 1: an output differs from float64 by more than
rounding, or the cache was copied instead of updated.
"""

from functools import partial

import jax.numpy as jnp
from flax import nnx
from layers.growing import advance
from layers.judge import judge, weights_of
from layers.sizes import HEAD_DIM, NUM_BLOCKS, NUM_HEADS, NUM_KV_HEADS, NUM_PAIRS, SIZE, SPECS
from layers.stacked import batch_of_layer

from pagedattn import AttentionSpec, paged_attention, write_kv


class Attention(nnx.Module):
    """Grouped-query attention with a residual connection."""

    def __init__(self, spec: AttentionSpec, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.spec = spec
        self.query = linear(SIZE, NUM_HEADS * HEAD_DIM)
        self.key = linear(SIZE, NUM_KV_HEADS * HEAD_DIM)
        self.value = linear(SIZE, NUM_KV_HEADS * HEAD_DIM)
        self.output = linear(NUM_HEADS * HEAD_DIM, SIZE)

    def __call__(self, x, cache, batch):
        projections = (self.query, self.key, self.value)
        query, key, value = (p(x).reshape(len(x), -1, HEAD_DIM) for p in projections)
        cache = write_kv(cache, key, value, batch.slot_mapping)
        out = paged_attention(query, cache, batch, self.spec)
        return x + self.output(out.reshape(len(x), -1)), cache


class Pair(nnx.Module):
    """What a scan repeats is the same each time, so it repeats one layer of each kind."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List(Attention(spec, rngs) for spec in SPECS)

    def __call__(self, x, cache, batch, index):
        for offset, layer in enumerate(self.layers):
            own = batch_of_layer(batch, index * len(SPECS) + offset, NUM_BLOCKS)
            x, cache = layer(x, cache, own)
        return x, cache


class Decoder(nnx.Module):
    """Pairs of layers, their weights stacked."""

    def __init__(self, rngs: nnx.Rngs):
        self.pairs = nnx.split_rngs(splits=NUM_PAIRS)(nnx.vmap(Pair))(rngs)

    def __call__(self, x, cache, batch):
        @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
        def through(carry, pair, index):
            return pair(*carry, batch, index)

        return through((x, cache), self.pairs, jnp.arange(NUM_PAIRS))


@partial(nnx.jit, static_argnames="max_query_len", donate_argnames=("cache", "pool"))
def step(model: Decoder, cache, pool, x, new, max_query_len: int):
    return advance(model, cache, pool, x, new, max_query_len)


def main() -> int:
    model = Decoder(nnx.Rngs(0))
    weights = weights_of(model.pairs.layers, lambda linear: linear.kernel)
    return judge(partial(step, model), weights)


if __name__ == "__main__":
    raise SystemExit(main())

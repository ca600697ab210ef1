"""Multi-head latent attention (DeepSeek's MLA) on a paged cache of latents.

    python examples/latent_attention.py

The keys and values of all heads are linear in one latent a token. `paged` keeps the latents, and
multiplies the queries and the results by those matrices instead: the latents are then the keys and
the values of one KV head. `plain` makes every key and value, without a cache. Two prompts, a chunk
and three steps of decoding give the same by both; the exit status is 1 if they do not.
"""

import sys
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import pagedattn as pa

WIDTH, HEADS = 64, 4
NOPE, ROPE, VALUE = 16, 8, 16  # columns of a head: its keys' unrotated and rotary ones, its values
QUERY_LATENT, LATENT = 24, 32
NUM_BLOCKS, BLOCK_SIZE = 16, 4
SCALE = (NOPE + ROPE) ** -0.5  # of the heads: absorbed queries are wider, but the same products
TOLERANCE = 1e-4


class Weights(NamedTuple):
    """Projections down to the latents and up to the heads; the rotary key is one for all heads."""

    query_down: Array  # [WIDTH, QUERY_LATENT]
    query_up: Array  # [QUERY_LATENT, HEADS, NOPE + ROPE]
    down: Array  # [WIDTH, LATENT + ROPE]
    key_up: Array  # [HEADS, LATENT, NOPE]
    value_up: Array  # [HEADS, LATENT, VALUE]
    out: Array  # [HEADS, VALUE, WIDTH]


SHAPES = (
    (WIDTH, QUERY_LATENT),
    (QUERY_LATENT, HEADS, NOPE + ROPE),
    (WIDTH, LATENT + ROPE),
    (HEADS, LATENT, NOPE),
    (HEADS, LATENT, VALUE),
    (HEADS, VALUE, WIDTH),
)  # of the fields of `Weights`


def random_weights(key: Array) -> Weights:
    keys = jax.random.split(key, len(SHAPES))
    return Weights(*(jax.random.normal(k, s) / 4 for k, s in zip(keys, SHAPES, strict=True)))


def normed(x: Array) -> Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def rotated(x: Array, positions: Array) -> Array:
    """Rotary positions: columns 2i and 2i + 1 turn by `position / 10000 ** (2i / ROPE)`."""
    angles = positions[:, None] * 10000.0 ** (-jnp.arange(0, ROPE, 2) / ROPE)
    angles = angles.reshape(len(x), *[1] * (x.ndim - 2), -1)
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    turned = jax.lax.complex(pairs[..., 0], pairs[..., 1]) * jnp.exp(1j * angles)
    return jnp.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def queries(w: Weights, x: Array, positions: Array) -> tuple[Array, Array]:
    """The unrotated and the rotary part of each head: `[tokens, HEADS, NOPE]` and `[..., ROPE]`."""
    query = jnp.einsum("tl,lhd->thd", normed(x @ w.query_down), w.query_up)
    return query[..., :NOPE], rotated(query[..., NOPE:], positions)


def latents(w: Weights, x: Array, positions: Array) -> Array:
    """What is kept of each token, `[tokens, LATENT + ROPE]`: its latent and its rotary key."""
    down = x @ w.down
    rotary = rotated(down[:, LATENT:], positions)
    return jnp.concatenate([normed(down[:, :LATENT]), rotary], axis=-1)


@partial(jax.jit, static_argnames="backend", donate_argnames="cache")
def paged(
    w: Weights, x: Array, cache: pa.KVCache, batch: pa.BatchMetadata, backend: str | None = None
) -> tuple[pa.KVCache, Array]:
    """The layer on new tokens `[tokens, WIDTH]`: their latents are written, then attended to."""
    nope, rope = queries(w, x, batch.positions)
    rows = latents(w, x, batch.positions)[:, None]  # one KV head
    cache = pa.write_kv(cache, rows, None, batch.slot_mapping)
    absorbed = jnp.einsum("thn,hln->thl", nope, w.key_up)  # <q, W c> = <W^T q, c>
    query, spec = jnp.concatenate([absorbed, rope], axis=-1), pa.AttentionSpec(scale=SCALE)
    mixed = pa.paged_attention(query, cache, batch, spec, backend=backend)
    return cache, jnp.einsum("thl,hlv,hvw->tw", mixed, w.value_up, w.out)


def plain(w: Weights, x: Array) -> Array:
    """The layer on one whole sequence: a key and a value for each head and token, and no cache."""
    positions = jnp.arange(len(x))
    nope, rope = queries(w, x, positions)
    kept = latents(w, x, positions)
    latent, rotary = kept[:, :LATENT], kept[:, LATENT:]
    key = jnp.einsum("tl,hln->thn", latent, w.key_up)
    value = jnp.einsum("tl,hlv->thv", latent, w.value_up)
    logits = jnp.einsum("qhn,khn->hqk", nope, key) + jnp.einsum("qhr,kr->hqk", rope, rotary)
    logits = jnp.where(positions > positions[:, None], -jnp.inf, SCALE * logits)
    weights = jax.nn.softmax(logits, axis=-1)
    return jnp.einsum("hqk,khv,hvw->qw", weights, value, w.out)


def main(backend: str | None = None) -> int:
    lengths, tables = [11, 6], [[3, 0, 7], [5, 1]]
    keys = jax.random.split(jax.random.key(0), 3)
    w = random_weights(keys[0])
    texts = [jax.random.normal(key, (n, WIDTH)) for key, n in zip(keys[1:], lengths, strict=True)]
    cache = pa.init_latent_cache(
        NUM_BLOCKS, BLOCK_SIZE, head_dim=LATENT + ROPE, value_dim=LATENT, dtype=jnp.float32
    )
    done, worst = [0, 0], 0.0
    want = [plain(w, text) for text in texts]
    for new in ([5, 3], [3, 0], [1, 1], [1, 1], [1, 1]):  # prompts, a chunk, decodes
        ends = [n + m for n, m in zip(done, new, strict=True)]
        spans = [slice(n, m) for n, m in zip(done, ends, strict=True)]
        batch = pa.make_batch(new, done, tables, block_size=BLOCK_SIZE, pad_blocks=3)
        x = jnp.concatenate([text[span] for text, span in zip(texts, spans, strict=True)])
        cache, out = paged(w, x, cache, batch, backend)
        rows = jnp.concatenate([row[span] for row, span in zip(want, spans, strict=True)])
        worst, done = max(worst, float(abs(out - rows).max())), ends
    print(f"largest difference {worst:.1e}, of values up to {float(abs(want[0]).max()):.1f}")
    print(f"kept of a token: {LATENT + ROPE} columns in place of {HEADS * (NOPE + ROPE + VALUE)}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())

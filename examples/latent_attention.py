"""Multi-head latent attention (DeepSeek's MLA) on a paged cache of latents.

    python examples/latent_attention.py

All keys and values are linear in one latent a token. `paged` keeps the latents, and multiplies the
queries and the results by those matrices instead: the latents are then the keys and the values of
one KV head. `plain` makes every key and value, without a cache. Exit status 1: they differ.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

import pagedattn as pa

WIDTH, HEADS, LATENT = 64, 4, 32
NOPE, ROPE, VALUE = 16, 8, 16  # columns of a head: its keys' unrotated and rotary ones, its values
SCALE = (NOPE + ROPE) ** -0.5  # of the heads: absorbed queries are wider, but the same products
SHAPES = {
    "query": (WIDTH, HEADS, NOPE + ROPE),
    "down": (WIDTH, LATENT + ROPE),  # to the latent, and to the rotary key of all heads
    "key_up": (HEADS, LATENT, NOPE),
    "value_up": (HEADS, LATENT, VALUE),
    "out": (HEADS, VALUE, WIDTH),
}


def rotated(x: Array, positions: Array) -> Array:
    """The last `ROPE` columns turned: 2i and 2i + 1 by `position / 10000 ** (2i / ROPE)`."""
    angles = positions.reshape(-1, *[1] * (x.ndim - 1)) / 10000.0 ** (jnp.arange(0, ROPE, 2) / ROPE)
    turned = jax.lax.complex(x[..., -ROPE::2], x[..., 1 - ROPE :: 2]) * jnp.exp(1j * angles)
    rope = jnp.stack([turned.real, turned.imag], axis=-1).reshape(*x.shape[:-1], ROPE)
    return jnp.concatenate([x[..., :-ROPE], rope], axis=-1)


@partial(jax.jit, static_argnames="backend", donate_argnames="cache")
def paged(w: dict[str, Array], x: Array, cache: pa.KVCache, batch: pa.BatchMetadata, backend=None):
    """The layer on new tokens `[tokens, WIDTH]`: their latents are written, then attended to."""
    query = rotated(jnp.einsum("tw,whd->thd", x, w["query"]), batch.positions)
    latents = rotated(x @ w["down"], batch.positions)[:, None]  # one KV head
    cache = pa.write_kv(cache, latents, None, batch.slot_mapping)
    absorbed = jnp.einsum("thn,hln->thl", query[..., :NOPE], w["key_up"])  # <q, W c> = <W^T q, c>
    query, spec = jnp.concatenate([absorbed, query[..., NOPE:]], -1), pa.AttentionSpec(scale=SCALE)
    mixed = pa.paged_attention(query, cache, batch, spec, backend=backend)
    return cache, jnp.einsum("thl,hlv,hvw->tw", mixed, w["value_up"], w["out"])


def plain(w: dict[str, Array], x: Array) -> Array:
    """The layer on one whole sequence: a key and a value for each head and token, and no cache."""
    positions = jnp.arange(len(x))
    query = rotated(jnp.einsum("tw,whd->thd", x, w["query"]), positions)
    latent, rope = jnp.split(rotated(x @ w["down"], positions), [LATENT], axis=-1)
    key, value = (jnp.einsum("tl,hlc->thc", latent, up) for up in (w["key_up"], w["value_up"]))
    key = jnp.concatenate([key, jnp.repeat(rope[:, None], HEADS, axis=1)], axis=-1)
    logits = SCALE * jnp.einsum("qhd,khd->hqk", query, key)
    weights = jax.nn.softmax(jnp.where(positions > positions[:, None], -jnp.inf, logits))
    return jnp.einsum("hqk,khv,hvw->qw", weights, value, w["out"])


def main(backend: str | None = None) -> int:
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(jax.random.key(1), (11, WIDTH))
    w = {name: jax.random.normal(k, SHAPES[name]) / 8 for name, k in zip(SHAPES, keys, strict=True)}
    cache = pa.init_latent_cache(4, 4, LATENT + ROPE, LATENT, jnp.float32)
    done, outs = 0, []
    for new in (5, 3, 1, 1, 1):  # a prompt, a chunk, decodes
        batch = pa.make_batch([new], [done], [[3, 0, 2]], block_size=4)
        cache, out = paged(w, x[done : done + new], cache, batch, backend)
        done, outs = done + new, [*outs, out]
    gap = float(abs(jnp.concatenate(outs) - plain(w, x)).max())
    kept, made = LATENT + ROPE, HEADS * (NOPE + ROPE + VALUE)
    print(f"largest difference {gap:.1e}; kept of a token: {kept} columns in place of {made}")
    return int(gap > 1e-4)


if __name__ == "__main__":
    raise SystemExit(main())

"""The two forward passes of a `Decoder`, which share everything but attention.

`forward_dense` computes one whole sequence without a cache: it serves to train the model, and to
check `forward_paged`. `forward_paged` computes the new tokens of many sequences at once, and leaves
everything about the cache to pagedattn.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pagedattn import (
    AttentionSpec,
    BatchMetadata,
    KVCache,
    attention_bias,
    paged_attention,
    write_kv,
)
from pagedattn_serving.families.decoder import Decoder, Heads, Hidden, Tokens, Values

Sinks = Float[Array, " num_heads"]


class Operands(NamedTuple):
    """What a layer gives to its attention, apart from the cache."""

    query: Heads
    key: Heads
    value: Values
    sinks: Sinks | None  # a logit a head that takes weight


def forward_dense(params: dict, model: Decoder, tokens: Tokens) -> Hidden:
    """Last layer's output for one sequence, with no cache."""
    uncached = [None] * model.num_hidden_layers
    return _forward(params, model, tokens, jnp.arange(len(tokens)), uncached, dense_attention)[0]


def cached_attention(
    operands: Operands,
    cache: KVCache,
    batch: BatchMetadata,
    spec: AttentionSpec,
    backend: str | None = None,
    batch_invariant: bool = False,
) -> tuple[Values, KVCache]:
    """Attention of new tokens, and the cache, to which their keys and values are written first."""
    query, key, value, sinks = operands
    held = None if cache.value is None else value  # else it is a part of the key
    cache = write_kv(cache, key, held, batch.slot_mapping)
    options = {"backend": backend, "batch_invariant": batch_invariant, "sinks": sinks}
    return paged_attention(query, cache, batch, spec, **options), cache


def forward_paged(
    params: dict,
    model: Decoder,
    tokens: Tokens,
    caches: list[KVCache],
    batch: BatchMetadata,
    backend: str | None = None,
    attend: Callable = cached_attention,
) -> tuple[Hidden, list[KVCache]]:
    """Last layer's output for new tokens, and the caches, one a layer, after the write.

    `attend` is `cached_attention`, or the same over several devices (parallel/tensor.py).
    """

    def cached(operands: Operands, cache: KVCache, spec: AttentionSpec):
        return attend(operands, cache, batch, spec, backend)

    return _forward(params, model, tokens, batch.positions, caches, cached)


def dense_attention(operands: Operands, cache: None, spec: AttentionSpec) -> tuple[Heads, None]:
    """Attention of a whole sequence to itself, by the textbook formula."""
    query, key, value, sinks = operands
    num_tokens, num_kv_heads, head_dim = key.shape
    grouped = query.reshape(num_tokens, num_kv_heads, -1, head_dim)
    logits = spec.scale_for(head_dim) * jnp.einsum("qhgd,khd->hgqk", grouped, key)
    if (cap := spec.logits_soft_cap) is not None:
        logits = cap * jnp.tanh(logits / cap)
    positions = jnp.arange(num_tokens)
    bias = attention_bias(positions, positions, spec)  # [q, k], or [heads, q, k] with ALiBi
    by_head = logits.reshape(-1, num_tokens, num_tokens) + bias
    if sinks is not None:  # keys after the last, of which no value comes
        last = jnp.broadcast_to(sinks[:, None, None], (*by_head.shape[:2], 1))
        by_head = jnp.concatenate([by_head, last], axis=-1)
    weights = jax.nn.softmax(by_head, axis=-1)[..., :num_tokens].reshape(logits.shape)
    out = jnp.einsum("hgqk,khd->qhgd", weights, value)
    return out.reshape(*query.shape[:2], value.shape[-1]), cache


def _forward(params: dict, model: Decoder, tokens: Tokens, positions: Tokens, caches, attend):
    """The decoder around any `attend(operands, cache, spec) -> (out, cache)`."""
    hidden, new_caches = model.embed(params, tokens), []
    for index, (layer, cache) in enumerate(zip(params["layers"], caches, strict=True)):
        operands = Operands(*model.heads(index, layer, hidden, positions), layer.get("sinks"))
        out, cache = attend(operands, cache, model.attention_spec(index))
        new_caches.append(cache)
        hidden = model.rest(layer, hidden, out.reshape(len(tokens), -1))
    return hidden, new_caches

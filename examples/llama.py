"""A Llama-architecture decoder in JAX: RMSNorm, RoPE, SwiGLU, grouped-query attention.

The two forwards share everything but attention. `forward_dense` sees one whole sequence and keeps
nothing: it trains the model and checks the other. `forward_paged` sees the new tokens of many
sequences at once and leaves everything about the cache to pagedattn.

Parameters are a dict of arrays; weights are `[out, in]`, as Hugging Face stores them.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from pagedattn import AttentionSpec, BatchMetadata, KVCache, paged_attention, write_kv

Hidden = Float[Array, "num_tokens hidden_size"]
Heads = Float[Array, "num_tokens num_heads head_dim"]
Tokens = Int[Array, " num_tokens"]


@dataclass(frozen=True)
class LlamaConfig:
    """What shapes the model: names and defaults are those of a Hugging Face `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The tokens that end a completion: none, one or several."""
        ids = self.eos_token_id
        return ids if isinstance(ids, tuple) else () if ids is None else (ids,)


def attention_spec(config: LlamaConfig, layer: int) -> AttentionSpec:
    """What attention computes in one layer: the place for other families' windows, caps and slopes.

    `dense_attention` has to follow.
    """
    del layer  # Llama and Mistral are alike in every layer; Gemma 2 alternates windows.
    return AttentionSpec(sliding_window=config.sliding_window)


def init_params(config: LlamaConfig, key: PRNGKeyArray) -> dict:
    """Random float32 parameters; the layers that end a residual branch start smaller."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    shapes = {
        "query": (heads * head_dim, hidden),
        "key": (kv_heads * head_dim, hidden),
        "value": (kv_heads * head_dim, hidden),
        "output": (hidden, heads * head_dim),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    branch_scale = 0.02 * (2 * config.num_hidden_layers) ** -0.5
    scales = {"output": branch_scale, "down": branch_scale}

    def init_layer(key: PRNGKeyArray) -> dict:
        keys = jax.random.split(key, len(shapes))
        normal = {
            name: scales.get(name, 0.02) * jax.random.normal(key, shape)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        return normal | {"attention_norm": jnp.ones(hidden), "mlp_norm": jnp.ones(hidden)}

    embed_key, head_key, *layer_keys = jax.random.split(key, config.num_hidden_layers + 2)
    params = {
        "embedding": 0.02 * jax.random.normal(embed_key, (config.vocab_size, hidden)),
        "layers": [init_layer(key) for key in layer_keys],
        "norm": jnp.ones(hidden),
    }
    if not config.tie_word_embeddings:
        params["lm_head"] = 0.02 * jax.random.normal(head_key, (config.vocab_size, hidden))
    return params


def rms_norm(x: Hidden, weight: Float[Array, " hidden_size"], eps: float) -> Hidden:
    return weight * x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def rope(x: Heads, positions: Tokens, theta: float) -> Heads:
    """Rotates the pairs (i, i + head_dim / 2) by an angle that grows with the position."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half) / half)
    angles = (positions[:, None] * frequencies)[:, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def swiglu(layer: dict, x: Hidden) -> Hidden:
    return (jax.nn.silu(x @ layer["gate"].T) * (x @ layer["up"].T)) @ layer["down"].T


def heads_of(layer: dict, config: LlamaConfig, x: Hidden, positions: Tokens):
    """Query, key and value heads of each token, the first two rotated to their positions."""
    query, key, value = (
        (x @ layer[name].T).reshape(len(x), -1, config.head_dim)
        for name in ("query", "key", "value")
    )
    return rope(query, positions, config.rope_theta), rope(key, positions, config.rope_theta), value


def decode(params: dict, config: LlamaConfig, tokens: Tokens, positions: Tokens, caches, attend):
    """The decoder around any `attend(query, key, value, cache, spec) -> (out, cache)`."""
    hidden, new_caches = params["embedding"][tokens], []
    for index, (layer, cache) in enumerate(zip(params["layers"], caches, strict=True)):
        x = rms_norm(hidden, layer["attention_norm"], config.rms_norm_eps)
        query, key, value = heads_of(layer, config, x, positions)
        out, cache = attend(query, key, value, cache, attention_spec(config, index))
        new_caches.append(cache)
        hidden += out.reshape(len(tokens), -1) @ layer["output"].T
        hidden += swiglu(layer, rms_norm(hidden, layer["mlp_norm"], config.rms_norm_eps))
    return rms_norm(hidden, params["norm"], config.rms_norm_eps), new_caches


def logits_of(params: dict, hidden: Hidden) -> Float[Array, "num_tokens vocab_size"]:
    """Scores of the next token, in the last hidden states' order."""
    return hidden @ params.get("lm_head", params["embedding"]).T


def dense_attention(query: Heads, key: Heads, value: Heads, cache: None, spec: AttentionSpec):
    """Causal attention of a whole sequence to itself, by the textbook formula."""
    num_tokens, num_kv_heads, head_dim = key.shape
    grouped = query.reshape(num_tokens, num_kv_heads, -1, head_dim)
    logits = head_dim**-0.5 * jnp.einsum("qhgd,khd->hgqk", grouped, key)
    distance = jnp.arange(num_tokens)[:, None] - jnp.arange(num_tokens)
    visible = (distance >= 0) & (distance < (spec.sliding_window or num_tokens))
    weights = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), axis=-1)
    return jnp.einsum("hgqk,khd->qhgd", weights, value).reshape(query.shape), cache


def forward_dense(params: dict, config: LlamaConfig, tokens: Tokens) -> Hidden:
    """Last hidden states of one sequence, with no cache."""
    positions = jnp.arange(len(tokens))
    uncached = [None] * config.num_hidden_layers
    return decode(params, config, tokens, positions, uncached, dense_attention)[0]


def forward_paged(
    params: dict,
    config: LlamaConfig,
    tokens: Tokens,
    caches: list[KVCache],
    batch: BatchMetadata,
    backend: str | None = None,
) -> tuple[Hidden, list[KVCache]]:
    """Last hidden states of a batch's new tokens, and the caches, one a layer, after the write."""

    def attend(query: Heads, key: Heads, value: Heads, cache: KVCache, spec: AttentionSpec):
        cache = write_kv(cache, key, value, batch.slot_mapping)
        return paged_attention(query, cache, batch, spec, backend=backend), cache

    return decode(params, config, tokens, batch.positions, caches, attend)

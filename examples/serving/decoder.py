"""Decoder-only models: what all families share, and the two forward passes.

A family is a subclass of `Decoder`: its fields are those of its `config.json`, its methods are what
differs between families. The two passes share everything but attention. `forward_dense` computes
one whole sequence without a cache: it serves to train the model, and to check `forward_paged`.
`forward_paged` computes the new tokens of many sequences at once, and leaves everything about the
cache to pagedattn.

Parameters are a dict of arrays; weights are `[out, in]`, as Hugging Face stores them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pagedattn import (
    AttentionSpec,
    BatchMetadata,
    InvalidInputError,
    KVCache,
    attention_bias,
    init_kv_cache,
    paged_attention,
    write_kv,
)
from serving.settings import refuse_others, require

Hidden = Float[Array, "num_tokens hidden_size"]
Heads = Float[Array, "num_tokens _ head_dim"]  # of queries, or of keys: fewer
Values = Float[Array, "num_tokens _ value_dim"]
Logits = Float[Array, "num_tokens vocab_size"]
Tokens = Int[Array, " num_tokens"]
Sinks = Float[Array, " num_heads"]
Name = str | tuple[str, ...]  # of a tensor of a checkpoint, or of those that make up one of ours


class Operands(NamedTuple):
    """What a layer gives to its attention, apart from the cache."""

    query: Heads
    key: Heads
    value: Values
    sinks: Sinks | None  # a logit a head that takes weight


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A model without its parameters; hashable, so static under `jax.jit`.

    Fields are named as in a Hugging Face `config.json`.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    eos_token_id: int | tuple[int, ...] | None = None

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    base_prefix: ClassVar[str] = "model."  # of the names of all tensors but the head's
    layer_prefix: ClassVar[str] = "model.layers.{}."
    # Settings of a config: other names of fields, accepted values, and what changes nothing here.
    renamed: ClassVar[Mapping[str, str]] = {}
    required: ClassVar[Mapping[str, tuple]] = {}
    ignored: ClassVar[tuple[str, ...]] = ()
    quantised: ClassVar[tuple[str, ...]] = ("fp8",)  # methods of which serving/quantised.py knows

    @classmethod
    def from_config(cls, raw: dict) -> Self:
        """The model of a parsed `config.json`.

        Raises:
          InvalidInputError: It asks for something that the family does not compute.
        """
        name = cls.model_type
        quantised = raw.get("quantization_config") or {}
        if quantised and quantised.get("quant_method") not in cls.quantised:
            raise InvalidInputError(
                f"{name}: expected a checkpoint that is not quantized, or by {cls.quantised}, got "
                f"{quantised}"
            )
        raw = {setting: raw[setting] for setting in raw if setting != "quantization_config"}
        raw = cls.read({cls.renamed.get(theirs, theirs): value for theirs, value in raw.items()})
        require(name, raw, cls.required)
        ours = {field.name for field in fields(cls)}
        refuse_others(name, raw, {*ours, *cls.required, *cls.ignored, "model_type"})
        values: dict[str, Any] = {name: _hashable(raw[name]) for name in ours & raw.keys()}
        return cls(**values)

    @classmethod
    def read(cls, raw: dict) -> dict:
        """Takes settings out of `raw` that are no fields, and puts in the fields they stand for."""
        return raw

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The tokens that end a completion: none, one or several."""
        ids = self.eos_token_id
        return ids if isinstance(ids, tuple) else () if ids is None else (ids,)

    def outer_names(self) -> dict[str, str]:
        """The checkpoint's names of the tensors outside the layers, by ours."""
        raise NotImplementedError

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer."""
        specs = (self.attention_spec(index) for index in range(self.num_hidden_layers))
        return tuple(spec.sliding_window for spec in specs)

    @property
    def other_layers(self) -> tuple[str, ...]:
        """How the names of tensors begin that a checkpoint may have and that no token needs."""
        return ()

    def layer_names(self, index: int) -> Mapping[str, Name]:
        """The checkpoint's names of a layer's tensors, without the layer's prefix, by ours.

        One called "sinks" is a logit a head that takes weight in attention's softmax.
        """
        raise NotImplementedError

    def init_cache(self, num_blocks: int, block_size: int, dtype) -> KVCache:
        """An empty cache of one layer."""
        heads = self.num_key_value_heads, self.head_dim
        return init_kv_cache(num_blocks, block_size, *heads, dtype)

    def embed(self, params: dict, tokens: Tokens) -> Hidden:
        return params["embedding"][tokens]

    def heads(
        self, index: int, layer: dict, hidden: Hidden, positions: Tokens
    ) -> tuple[Heads, Heads, Values]:
        """Query, key and value of each token: the part of layer `index` before attention."""
        raise NotImplementedError

    def attention_spec(self, index: int) -> AttentionSpec:
        """What attention computes in layer `index`."""
        del index
        return AttentionSpec()

    def rest(self, layer: dict, hidden: Hidden, attended: Hidden) -> Hidden:
        """The part of a layer after attention: its output, from its input and the attention's."""
        raise NotImplementedError

    def logits(self, params: dict, hidden: Hidden) -> Logits:
        """Scores of the next token."""
        raise NotImplementedError


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
) -> tuple[Values, KVCache]:
    """Attention of new tokens, and the cache, to which their keys and values are written first."""
    query, key, value, sinks = operands
    held = None if cache.value is None else value  # else it is a part of the key
    cache = write_kv(cache, key, held, batch.slot_mapping)
    return paged_attention(query, cache, batch, spec, backend=backend, sinks=sinks), cache


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

    `attend` is `cached_attention`, or the same over several devices (serving/parallel.py).
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


def _hashable(value):
    return tuple(value) if isinstance(value, list) else value

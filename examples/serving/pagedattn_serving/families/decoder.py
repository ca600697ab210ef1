"""Decoder-only models: what all families share. The passes over them are in families/forward.py.

A family is a subclass of `Decoder`: its fields are those of its `config.json`, its methods are what
differs between families. Parameters are a dict of arrays; weights are `[out, in]`, as Hugging Face
stores them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pagedattn import AttentionSpec, InvalidInputError, KVCache, init_kv_cache
from pagedattn_serving.families.settings import refuse_others, require, require_kinds

Hidden = Float[Array, "num_tokens hidden_size"]
Heads = Float[Array, "num_tokens _ head_dim"]  # of queries, or of keys: fewer
Values = Float[Array, "num_tokens _ value_dim"]
Logits = Float[Array, "num_tokens vocab_size"]
Tokens = Int[Array, " num_tokens"]
Name = str | tuple[str, ...]  # of a tensor of a checkpoint, or of those that make up one of ours


def scales_for(dtype: DTypeLike) -> Literal["token"] | None:
    """The scales of a cache of a dtype."""
    return "token" if jnp.dtype(dtype).itemsize == 1 else None


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
    quantised: ClassVar[tuple[str, ...]] = (
        "fp8",
    )  # methods of which checkpoint/quantised.py knows

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
        ours = {field.name: field.type for field in fields(cls)}
        refuse_others(name, raw, {*ours, *cls.required, *cls.ignored, "model_type"})
        values: dict[str, Any] = {name: _hashable(raw[name]) for name in ours.keys() & raw.keys()}
        require_kinds(name, values, ours)
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
        """An empty cache of one layer; of few bits with scales for each token."""
        heads = self.num_key_value_heads, self.head_dim
        return init_kv_cache(num_blocks, block_size, *heads, dtype, scales=scales_for(dtype))

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


def _hashable(value):
    return tuple(value) if isinstance(value, list) else value

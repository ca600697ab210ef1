"""Llama, and the families that change a little of it: Mistral, Qwen2, Qwen3."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import jax

from pagedattn import AttentionSpec
from serving.decoder import Decoder, Heads, Hidden, Logits, Tokens

from .pieces import (
    FULL,
    SLIDING,
    biases,
    gated_mlp,
    head_logits,
    linear,
    read_layer_types,
    rms_norm,
)
from .rotary import Linear, Llama3, read_rope, rope

WEIGHTS = {
    "attention_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "output": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}


@dataclass(frozen=True, kw_only=True)
class Llama(Decoder):
    """RMSNorm, RoPE, SwiGLU, grouped-query attention."""

    intermediate_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Linear | Llama3 | None = None
    attention_bias: bool = False

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    required: ClassVar[Mapping[str, tuple]] = {"hidden_act": ("silu",), "mlp_bias": (False,)}

    @classmethod
    def from_config(cls, raw: dict) -> Self:
        raw = raw | read_rope(raw)
        raw["head_dim"] = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
        if raw.get("num_key_value_heads") is None:
            raw["num_key_value_heads"] = raw["num_attention_heads"]
        return super().from_config(raw)

    def outer_names(self) -> dict[str, str]:
        names = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight"}
        return names if self.tie_word_embeddings else names | {"lm_head": "lm_head.weight"}

    def layer_names(self) -> dict[str, str]:
        biased = ("query", "key", "value", "output") if self.attention_bias else ()
        return WEIGHTS | biases(WEIGHTS, *biased)

    def heads(self, layer: dict, hidden: Hidden, positions: Tokens) -> tuple[Heads, Heads, Heads]:
        query, key, value = self.unrotated(layer, hidden)
        return self.rotate(query, positions), self.rotate(key, positions), value

    def unrotated(self, layer: dict, hidden: Hidden) -> tuple[Heads, Heads, Heads]:
        """Query, key and value before the rotary position embedding."""
        x = rms_norm(hidden, layer["attention_norm"], self.rms_norm_eps)
        query, key, value = (
            linear(layer, name, x).reshape(len(x), -1, self.head_dim)
            for name in ("query", "key", "value")
        )
        return query, key, value

    def rotate(self, heads: Heads, positions: Tokens) -> Heads:
        return rope(heads, positions, self.rope_theta, self.rope_scaling)

    def rest(self, layer: dict, hidden: Hidden, attended: Hidden) -> Hidden:
        hidden = hidden + linear(layer, "output", attended)
        x = rms_norm(hidden, layer["mlp_norm"], self.rms_norm_eps)
        return hidden + gated_mlp(layer, x, jax.nn.silu)

    def logits(self, params: dict, hidden: Hidden) -> Logits:
        hidden = rms_norm(hidden, params["norm"], self.rms_norm_eps)
        return head_logits(params, hidden)


@dataclass(frozen=True, kw_only=True)
class Mistral(Llama):
    """Llama with a window in every layer."""

    sliding_window: int | None = None

    model_type = "mistral"
    architecture = "MistralForCausalLM"
    required: ClassVar[Mapping[str, tuple]] = {**Llama.required, "attention_bias": (False,)}

    def attention_spec(self, index: int) -> AttentionSpec:
        del index
        return AttentionSpec(sliding_window=self.sliding_window)


@dataclass(frozen=True, kw_only=True)
class Qwen2(Llama):
    """Llama with biased queries, keys and values, and a window in some layers."""

    sliding_window: int | None = None
    layer_types: tuple[str, ...]

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"

    @classmethod
    def from_config(cls, raw: dict) -> Self:
        slides = raw.get("use_sliding_window", False)
        first = raw.get("max_window_layers", 28) if slides else raw["num_hidden_layers"]
        types = read_layer_types(raw, lambda index: SLIDING if index >= first else FULL)
        return super().from_config(raw | {"layer_types": types})

    def layer_names(self) -> dict[str, str]:
        return WEIGHTS | biases(WEIGHTS, "query", "key", "value")

    def attention_spec(self, index: int) -> AttentionSpec:
        slides = self.layer_types[index] == SLIDING
        return AttentionSpec(sliding_window=self.sliding_window if slides else None)


@dataclass(frozen=True, kw_only=True)
class Qwen3(Qwen2):
    """Qwen2 with normalised query and key heads, and biases only on request."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"

    def layer_names(self) -> dict[str, str]:
        norms = {"query_norm": "self_attn.q_norm.weight", "key_norm": "self_attn.k_norm.weight"}
        return Llama.layer_names(self) | norms

    def unrotated(self, layer: dict, hidden: Hidden) -> tuple[Heads, Heads, Heads]:
        query, key, value = super().unrotated(layer, hidden)
        query = rms_norm(query, layer["query_norm"], self.rms_norm_eps)
        return query, rms_norm(key, layer["key_norm"], self.rms_norm_eps), value

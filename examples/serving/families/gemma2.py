"""Gemma 2: capped logits, alternating windows, norms on both sides of every branch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import jax.numpy as jnp

from pagedattn import AttentionSpec
from serving.decoder import Decoder, Heads, Hidden, Logits, Tokens

from .llama import WEIGHTS
from .pieces import (
    FULL,
    SLIDING,
    biases,
    gated_mlp,
    gelu_tanh,
    head_logits,
    linear,
    read_layer_types,
    rms_norm,
)
from .rotary import Linear, Llama3, read_rope, rope

NORMS = {
    "attention_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}


@dataclass(frozen=True, kw_only=True)
class Gemma2(Decoder):
    """Gemma 2; by default layers 0, 2, 4, ... have a sliding window."""

    intermediate_size: int
    query_pre_attn_scalar: float
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Linear | Llama3 | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...]
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    attention_bias: bool = False
    tie_word_embeddings: bool = True

    model_type = "gemma2"
    architecture = "Gemma2ForCausalLM"
    required: ClassVar[Mapping[str, tuple]] = {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (None, False),
    }

    @classmethod
    def from_config(cls, raw: dict) -> Self:
        types = read_layer_types(raw, lambda index: FULL if index % 2 else SLIDING)
        return super().from_config(raw | read_rope(raw) | {"layer_types": types})

    def outer_names(self) -> dict[str, str]:
        names = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight"}
        return names if self.tie_word_embeddings else names | {"lm_head": "lm_head.weight"}

    def layer_names(self) -> dict[str, str]:
        biased = ("query", "key", "value", "output") if self.attention_bias else ()
        return WEIGHTS | NORMS | biases(WEIGHTS, *biased)

    def attention_spec(self, index: int) -> AttentionSpec:
        slides = self.layer_types[index] == SLIDING
        return AttentionSpec(
            scale=self.query_pre_attn_scalar**-0.5,
            sliding_window=self.sliding_window if slides else None,
            logits_soft_cap=self.attn_logit_softcapping,
        )

    def embed(self, params: dict, tokens: Tokens) -> Hidden:
        return params["embedding"][tokens] * jnp.sqrt(self.hidden_size).astype(
            params["embedding"].dtype
        )

    def norm(self, x: Hidden, weight) -> Hidden:
        """RMSNorm whose weights are stored as differences from 1."""
        return rms_norm(x, 1 + weight, self.rms_norm_eps)

    def heads(self, layer: dict, hidden: Hidden, positions: Tokens) -> tuple[Heads, Heads, Heads]:
        x = self.norm(hidden, layer["attention_norm"])
        query, key, value = (
            linear(layer, name, x).reshape(len(x), -1, self.head_dim)
            for name in ("query", "key", "value")
        )
        query = rope(query, positions, self.rope_theta, self.rope_scaling)
        return query, rope(key, positions, self.rope_theta, self.rope_scaling), value

    def rest(self, layer: dict, hidden: Hidden, attended: Hidden) -> Hidden:
        branch = linear(layer, "output", attended)
        hidden = hidden + self.norm(branch, layer["attention_post_norm"])
        branch = gated_mlp(layer, self.norm(hidden, layer["mlp_norm"]), gelu_tanh)
        return hidden + self.norm(branch, layer["mlp_post_norm"])

    def logits(self, params: dict, hidden: Hidden) -> Logits:
        hidden = self.norm(hidden, params["norm"])
        logits = head_logits(params, hidden)
        cap = self.final_logit_softcapping
        return logits if cap is None else cap * jnp.tanh(logits / cap)

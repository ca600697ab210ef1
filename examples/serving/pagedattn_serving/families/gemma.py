"""Gemma 2 and the text part of Gemma 3: norms on both sides of every branch, windows by turns."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import jax.numpy as jnp

from pagedattn import AttentionSpec
from pagedattn_serving.families.decoder import Hidden, Logits, Name, Tokens

from .llama import BRANCH_NORMS, HEAD_NORMS, MLP
from .pieces import Features, gated_mlp, gelu_tanh, rms_norm
from .windowed import FULL, SLIDING, Windowed

NORMS = BRANCH_NORMS | {"mlp_norm": "pre_feedforward_layernorm.weight"}
GELU = ("gelu_pytorch_tanh",)


@dataclass(frozen=True, kw_only=True)
class Gemma2(Windowed):
    """Capped logits; by default layers 0, 2, 4, ... have a sliding window."""

    query_pre_attn_scalar: float
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    tie_word_embeddings: bool = True

    model_type = "gemma2"
    architecture = "Gemma2ForCausalLM"
    required: ClassVar[Mapping[str, tuple]] = {"hidden_activation": GELU, "hidden_act": GELU}
    ignored: ClassVar[tuple[str, ...]] = ("sliding_window_size",)

    @classmethod
    def layer_type(cls, raw: dict, index: int) -> str:
        return FULL if index % 2 else SLIDING

    def mlp_names(self) -> Mapping[str, Name]:
        return MLP | NORMS

    def attention_spec(self, index: int) -> AttentionSpec:
        scale, cap = self.query_pre_attn_scalar**-0.5, self.attn_logit_softcapping
        return replace(super().attention_spec(index), scale=scale, logits_soft_cap=cap)

    def embed(self, params: dict, tokens: Tokens) -> Hidden:
        scale = jnp.sqrt(self.hidden_size).astype(params["embedding"].dtype)
        return params["embedding"][tokens] * scale

    def normed(self, x: Features, weight) -> Features:
        """RMSNorm whose weights are stored as differences from 1."""
        return rms_norm(x, 1 + weight.astype(jnp.float32), self.rms_norm_eps)

    def mlp(self, layer: dict, x: Hidden) -> Hidden:
        return gated_mlp(layer, x, gelu_tanh)

    def logits(self, params: dict, hidden: Hidden) -> Logits:
        logits, cap = super().logits(params, hidden), self.final_logit_softcapping
        return logits if cap is None else cap * jnp.tanh(logits / cap)


@dataclass(frozen=True, kw_only=True)
class Gemma3(Gemma2):
    """Normalised heads, and two RoPEs: by default every sixth layer has no window."""

    rope_theta: float = 1e6
    rope_local_base_freq: float | None = 10000.0

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    required: ClassVar[Mapping[str, tuple]] = {
        **Gemma2.required,
        "attn_logit_softcapping": (None,),  # its attention has none in transformers either
    }

    ignored: ClassVar[tuple[str, ...]] = ("sliding_window_pattern",)  # but by layer_type

    @classmethod
    def layer_type(cls, raw: dict, index: int) -> str:
        return SLIDING if (index + 1) % raw.get("sliding_window_pattern", 6) else FULL

    def attention_names(self) -> Mapping[str, Name]:
        return {**super().attention_names(), **HEAD_NORMS}

"""Cohere's Command R, R+ and R7B: attention and MLP side by side, after one layer norm."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from pagedattn_serving.families.decoder import Heads, Hidden, Logits, Name, Tokens

from .llama import MLP, Llama
from .pieces import Features, layer_norm, linear
from .rotary import paired_apart
from .windowed import FULL, SLIDING, Windowed


@dataclass(frozen=True, kw_only=True)
class Cohere(Windowed):
    """Llama with a parallel block, layer norms without biases and RoPE of neighbours."""

    layer_norm_eps: float = 1e-5
    logit_scale: float = 0.0625
    rope_theta: float = 500000.0
    tie_word_embeddings: bool = True

    model_type = "cohere"
    architecture = "CohereForCausalLM"
    ignored: ClassVar[tuple[str, ...]] = ("model_max_length",)

    @classmethod
    def layer_type(cls, raw: dict, index: int) -> str:
        del raw, index
        return FULL

    def mlp_names(self) -> Mapping[str, Name]:
        return {name: MLP[name] for name in ("gate", "up", "down")}

    def normed(self, x: Features, weight) -> Features:
        return layer_norm(x, weight, jnp.zeros_like(weight), self.layer_norm_eps)

    def rotate(self, index: int, heads: Heads, positions: Tokens) -> Heads:
        return super().rotate(index, paired_apart(heads), positions)

    def rest(self, layer: dict, hidden: Hidden, attended: Hidden) -> Hidden:
        x = self.mlp(layer, self.norm(layer, "attention_norm", hidden))
        return hidden + linear(layer, "output", attended) + x

    def logits(self, params: dict, hidden: Hidden) -> Logits:
        return self.logit_scale * super().logits(params, hidden)


@dataclass(frozen=True, kw_only=True)
class Cohere2(Cohere):
    """By default three of four layers have a window, and they alone rotate."""

    rope_theta: float = 10000.0

    model_type = "cohere2"
    architecture = "Cohere2ForCausalLM"
    required: ClassVar[Mapping[str, tuple]] = {
        **Llama.required,
        "position_embedding_type": ("rope_gptj",),
        "rotary_pct": (1.0,),
        "use_gated_activation": (True,),
        "use_parallel_block": (True,),
        "order_of_interleaved_layers": ("local_attn_first",),
    }
    ignored: ClassVar[tuple[str, ...]] = (
        "layer_switch",
        "sliding_window_pattern",
        "use_embedding_sharing",
    )

    @classmethod
    def layer_type(cls, raw: dict, index: int) -> str:
        return SLIDING if (index + 1) % raw.get("sliding_window_pattern", 4) else FULL

    def rotate(self, index: int, heads: Heads, positions: Tokens) -> Heads:
        return super().rotate(index, heads, positions) if self.slides(index) else heads

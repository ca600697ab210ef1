"""Llama, of which most families change a little: a norm, a projection, the kind of a layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
from jaxtyping import Array, Float

from pagedattn_serving.families.decoder import Decoder, Heads, Hidden, Logits, Name, Tokens

from .pieces import (
    QUERY_KEY_VALUE,
    Features,
    biases,
    gated_mlp,
    head_logits,
    linear,
    linears,
    rms_norm,
)
from .rotary import Scaling, rope, take_rope

ATTENTION = {
    "attention_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "output": "self_attn.o_proj.weight",
}
HEAD_NORMS = {"query_norm": "self_attn.q_norm.weight", "key_norm": "self_attn.k_norm.weight"}
BRANCH_NORMS = {
    "attention_post_norm": "post_attention_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
MLP = {
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
Flat = Float[Array, "num_tokens _"]


@dataclass(frozen=True, kw_only=True)
class Llama(Decoder):
    """RMSNorm, RoPE, SwiGLU, grouped-query attention.

    A family names its tensors; what a layer has no norm for stays as it is.
    """

    intermediate_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Scaling | None = None
    attention_bias: bool = False

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    required: ClassVar[Mapping[str, tuple]] = {"hidden_act": ("silu",)}

    @classmethod
    def read(cls, raw: dict) -> dict:
        raw["head_dim"] = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
        if raw.get("num_key_value_heads") is None:
            raw["num_key_value_heads"] = raw["num_attention_heads"]
        rope = take_rope(raw)
        return raw | rope

    def outer_names(self) -> dict[str, str]:
        names = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight"}
        return names if self.tie_word_embeddings else names | {"lm_head": "lm_head.weight"}

    def layer_names(self, index: int) -> Mapping[str, Name]:
        del index  # some families have other tensors in some layers
        return {**self.attention_names(), **self.mlp_names()}

    def attention_names(self) -> Mapping[str, Name]:
        biased = ("query", "key", "value", "output") if self.attention_bias else ()
        return ATTENTION | biases(ATTENTION, *biased)

    def mlp_names(self) -> Mapping[str, Name]:
        return MLP

    def normed(self, x: Features, weight) -> Features:
        return rms_norm(x, weight, self.rms_norm_eps)

    def norm(self, tensors: dict, name: str, x: Features) -> Features:
        """The norm of that name, or x where there is none."""
        return self.normed(x, tensors[name]) if name in tensors else x

    def heads(
        self, index: int, layer: dict, hidden: Hidden, positions: Tokens
    ) -> tuple[Heads, Heads, Heads]:
        query, key, value = self.project(layer, self.norm(layer, "attention_norm", hidden))
        query = self.norm_heads(layer, "query_norm", query)
        key = self.norm_heads(layer, "key_norm", key)
        query, key, value = (x.reshape(len(x), -1, self.head_dim) for x in (query, key, value))
        return self.rotate(index, query, positions), self.rotate(index, key, positions), value

    def project(self, layer: dict, x: Hidden) -> tuple[Flat, Flat, Flat]:
        """Query, key and value, the heads side by side."""
        heads = self.num_attention_heads, self.num_key_value_heads, self.num_key_value_heads
        query, key, value = linears(layer, QUERY_KEY_VALUE, x, heads)
        return query, key, value

    def norm_heads(self, layer: dict, name: str, x: Flat) -> Flat:
        """The norm of that name over as many features as it has: a head's, or all heads'."""
        groups = x.reshape(len(x), -1, layer[name].size) if name in layer else x
        return self.norm(layer, name, groups).reshape(x.shape)

    def rotate(self, index: int, heads: Heads, positions: Tokens) -> Heads:
        del index  # some families rotate otherwise in some layers
        return rope(heads, positions, self.rope_theta, self.rope_scaling)

    def rest(self, layer: dict, hidden: Hidden, attended: Hidden) -> Hidden:
        hidden = hidden + self.branch(
            layer, "attention_post_norm", linear(layer, "output", attended)
        )
        x = self.mlp(layer, self.norm(layer, "mlp_norm", hidden))
        return hidden + self.branch(layer, "mlp_post_norm", x)

    def branch(self, layer: dict, name: str, x: Hidden) -> Hidden:
        """What attention or the MLP adds, from what it has computed."""
        return self.norm(layer, name, x)

    def mlp(self, layer: dict, x: Hidden) -> Hidden:
        return gated_mlp(layer, x, jax.nn.silu)

    def logits(self, params: dict, hidden: Hidden) -> Logits:
        return head_logits(params, self.norm(params, "norm", hidden))

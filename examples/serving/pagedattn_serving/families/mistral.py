"""Mistral: Llama with a window in every layer. Mixtral: Mistral with experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pagedattn_serving.families.decoder import Hidden, Name

from .experts import each_expert, gated_experts, route
from .llama import MLP, Llama
from .windowed import Windowed

EXPERTS = {
    "gate": "block_sparse_moe.experts.{}.w1.weight",
    "up": "block_sparse_moe.experts.{}.w3.weight",
    "down": "block_sparse_moe.experts.{}.w2.weight",
}


@dataclass(frozen=True, kw_only=True)
class Mistral(Windowed):
    """Llama with a window in every layer, or in none."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"
    required: ClassVar[Mapping[str, tuple]] = {**Llama.required, "attention_bias": (False,)}


@dataclass(frozen=True, kw_only=True)
class Mixtral(Mistral):
    """Mistral in which a router weighs `num_experts_per_tok` MLPs for each token."""

    num_local_experts: int
    num_experts_per_tok: int = 2
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"

    def mlp_names(self) -> Mapping[str, Name]:
        router = {"mlp_norm": MLP["mlp_norm"], "router": "block_sparse_moe.gate.weight"}
        return router | each_expert(EXPERTS, self.num_local_experts)

    def mlp(self, layer: dict, x: Hidden) -> Hidden:
        routed = route(layer, x, self.num_experts_per_tok, normalised=True)
        return gated_experts(layer, x, routed)

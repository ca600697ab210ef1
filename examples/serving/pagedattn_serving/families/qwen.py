"""Qwen 2, 3 and 3 MoE: biases or normalised heads, windows in some layers, experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pagedattn_serving.families.decoder import Hidden, Name

from .experts import each_expert, gated_experts, route
from .llama import ATTENTION, HEAD_NORMS, MLP, Llama
from .pieces import biases
from .windowed import FULL, SLIDING, Windowed

EXPERTS = {
    "gate": "mlp.experts.{}.gate_proj.weight",
    "up": "mlp.experts.{}.up_proj.weight",
    "down": "mlp.experts.{}.down_proj.weight",
}


@dataclass(frozen=True, kw_only=True)
class Qwen2(Windowed):
    """Llama with biased queries, keys and values, and on request a window in the upper layers."""

    use_sliding_window: bool = False

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    ignored: ClassVar[tuple[str, ...]] = ("max_window_layers",)

    @classmethod
    def layer_type(cls, raw: dict, index: int) -> str:
        return SLIDING if index >= raw.get("max_window_layers", 28) else FULL

    @classmethod
    def read(cls, raw: dict) -> dict:
        if not raw.get("use_sliding_window"):
            raw["sliding_window"] = None
        return super().read(raw)

    def attention_names(self) -> Mapping[str, Name]:
        return ATTENTION | biases(ATTENTION, "query", "key", "value")


@dataclass(frozen=True, kw_only=True)
class Qwen3(Qwen2):
    """Qwen2 with normalised query and key heads, and biases only on request."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"

    def attention_names(self) -> Mapping[str, Name]:
        return {**Llama.attention_names(self), **HEAD_NORMS}


@dataclass(frozen=True, kw_only=True)
class Qwen3Moe(Qwen3):
    """Qwen3 with experts in every layer, and a window in all or none."""

    num_local_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool = False

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    renamed: ClassVar[Mapping[str, str]] = {"num_experts": "num_local_experts"}
    required: ClassVar[Mapping[str, tuple]] = {**Llama.required, "decoder_sparse_step": (1,)}

    @classmethod
    def layer_type(cls, raw: dict, index: int) -> str:
        del raw, index
        return SLIDING

    def mlp_names(self) -> Mapping[str, Name]:
        router = {"mlp_norm": MLP["mlp_norm"], "router": "mlp.gate.weight"}
        return router | each_expert(EXPERTS, self.num_local_experts)

    def mlp(self, layer: dict, x: Hidden) -> Hidden:
        routed = route(layer, x, self.num_experts_per_tok, self.norm_topk_prob)
        return gated_experts(layer, x, routed)

"""DeepSeek-V2 and V3: latent attention; experts in groups, beside some that every token gets."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pagedattn_serving.families.decoder import Hidden, Name

from .experts import GATED, Routed, each_expert, gated_experts
from .latent import LatentAttention
from .llama import MLP, Llama
from .pieces import gated_mlp
from .qwen import EXPERTS

SHARED = {f"shared_{n}": MLP[n].replace("mlp.", "mlp.shared_experts.") for n in GATED}
Scores = Float[Array, "num_tokens num_experts"]


@dataclass(frozen=True, kw_only=True)
class DeepseekV3(LatentAttention):
    """Experts by sigmoids, out of the best groups; layers for later tokens are left out."""

    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int = 1
    num_experts_per_tok: int
    n_group: int = 8
    topk_group: int = 4
    first_k_dense_replace: int = 3
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    num_nextn_predict_layers: int = 1

    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    renamed: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    }
    required: ClassVar[Mapping[str, tuple]] = {
        **Llama.required,
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    }
    ignored: ClassVar[tuple[str, ...]] = ("aux_loss_alpha", "ep_size", "qk_head_dim", "seq_aux")
    num_judges: ClassVar[int] = 2  # so many of its experts speak for a group

    @property
    def other_layers(self) -> tuple[str, ...]:
        last = self.num_hidden_layers
        return tuple(
            self.layer_prefix.format(last + i) for i in range(self.num_nextn_predict_layers)
        )

    def layer_names(self, index: int) -> Mapping[str, Name]:
        dense = index < self.first_k_dense_replace
        return {**self.attention_names(), **(MLP if dense else self.expert_names())}

    def expert_names(self) -> Mapping[str, Name]:
        experts = each_expert(EXPERTS, self.n_routed_experts)
        return {"mlp_norm": MLP["mlp_norm"], **self.router_names(), **SHARED, **experts}

    def router_names(self) -> dict[str, str]:
        bias = "mlp.gate.e_score_correction_bias"
        return {"router": "mlp.gate.weight", "correction": bias}

    def mlp(self, layer: dict, x: Hidden) -> Hidden:
        if "router" not in layer:
            return super().mlp(layer, x)
        shared = {name: layer[f"shared_{name}"] for name in GATED}
        return gated_experts(layer, x, self.route(layer, x)) + gated_mlp(shared, x, jax.nn.silu)

    def route(self, layer: dict, x: Hidden) -> Routed:
        """In float32: chosen by scores and corrections, weighed by the scores alone."""
        scores = self.scores(jnp.matmul(x, layer["router"].T, preferred_element_type=jnp.float32))
        judged = self.of_best_groups(scores + layer.get("correction", 0.0))
        experts = jax.lax.top_k(judged, self.num_experts_per_tok)[1]
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return Routed(experts, self.routed_scaling_factor * weights)

    def scores(self, logits: Scores) -> Scores:
        return jax.nn.sigmoid(logits)

    def of_best_groups(self, scores: Scores) -> Scores:
        """The scores in the `topk_group` best groups, -inf in the others."""
        groups = scores.reshape(len(scores), self.n_group, -1)
        best = jax.lax.top_k(groups, self.num_judges)[0].sum(axis=-1)
        chosen = jax.nn.one_hot(jax.lax.top_k(best, self.topk_group)[1], self.n_group).any(axis=1)
        return jnp.where(chosen[..., None], groups, -jnp.inf).reshape(scores.shape)


@dataclass(frozen=True, kw_only=True)
class DeepseekV2(DeepseekV3):
    """Experts by a softmax, out of all or of the best groups, each judged by its best expert."""

    n_group: int = 1
    topk_group: int = 1
    topk_method: str = "greedy"
    first_k_dense_replace: int = 0
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    num_nextn_predict_layers: int = 0

    model_type = "deepseek_v2"
    architecture = "DeepseekV2ForCausalLM"
    renamed: ClassVar[Mapping[str, str]] = {"num_experts": "n_routed_experts"}
    required: ClassVar[Mapping[str, tuple]] = {
        **DeepseekV3.required,
        "norm_topk_prob": (False,),  # transformers computes no other
        "rope_interleave": (True,),
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
    }
    num_judges: ClassVar[int] = 1

    @classmethod
    def read(cls, raw: dict) -> dict:
        one_group = {"n_group": 1, "topk_group": 1}
        grouped = raw.get("topk_method") == "group_limited_greedy"
        return super().read(raw if grouped else raw | one_group)

    def router_names(self) -> dict[str, str]:
        return {"router": "mlp.gate.weight"}

    def scores(self, logits: Scores) -> Scores:
        return jax.nn.softmax(logits)

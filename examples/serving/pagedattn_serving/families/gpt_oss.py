"""gpt-oss: a sink in every head, windows by turns, experts with a clamped gate and biases."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from pagedattn_serving.families.decoder import Hidden, Name

from .experts import mixture, route
from .llama import MLP
from .rotary import Scaling, Yarn
from .windowed import FULL, SLIDING, Windowed

EXPERTS = {
    "gate_up_by_turns": "mlp.experts.gate_up_proj",
    "gate_up_by_turns_bias": "mlp.experts.gate_up_proj_bias",
    "down": "mlp.experts.down_proj",
    "down_bias": "mlp.experts.down_proj_bias",
}
YARN = Yarn(factor=32.0, original_max_position_embeddings=4096, truncate=False)
ROUTER = {"router": "mlp.router.weight", "router_bias": "mlp.router.bias"}


@dataclass(frozen=True, kw_only=True)
class GptOss(Windowed):
    """By default layers 0, 2, 4, ... have a sliding window. Its experts are `[in, out]`."""

    num_local_experts: int
    num_experts_per_tok: int
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    rms_norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    rope_scaling: Scaling | None = YARN
    attention_bias: bool = True

    model_type = "gpt_oss"
    architecture = "GptOssForCausalLM"
    renamed: ClassVar[Mapping[str, str]] = {"num_experts": "num_local_experts"}
    ignored: ClassVar[tuple[str, ...]] = ("experts_per_token", "initial_context_length")
    quantised: ClassVar[tuple[str, ...]] = ("mxfp4", "fp8")

    @classmethod
    def layer_type(cls, raw: dict, index: int) -> str:
        return FULL if index % 2 else SLIDING

    def attention_names(self) -> Mapping[str, Name]:
        return {**super().attention_names(), "sinks": "self_attn.sinks"}

    def mlp_names(self) -> Mapping[str, Name]:
        return {"mlp_norm": MLP["mlp_norm"], **ROUTER, **EXPERTS}

    def mlp(self, layer: dict, x: Hidden) -> Hidden:
        routed = route(layer, x, self.num_experts_per_tok, normalised=True)
        return mixture(layer, x, routed, tuple(EXPERTS), self.expert)

    def expert(self, weights: dict, x: Hidden) -> Hidden:
        """One expert; its gate and its other half stand in turns."""
        both = x @ weights["gate_up_by_turns"] + weights["gate_up_by_turns_bias"]
        gate = jnp.minimum(both[:, ::2], self.swiglu_limit)
        up = jnp.clip(both[:, 1::2], -self.swiglu_limit, self.swiglu_limit)
        gated = (up + 1) * gate * jax.nn.sigmoid(self.swiglu_alpha * gate)
        return gated @ weights["down"] + weights["down_bias"]

"""Phi-3: Mistral with one projection for query, key and value, and one for gate and up."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from serving.decoder import Hidden, Name

from .llama import ATTENTION, MLP, Flat
from .mistral import Mistral
from .pieces import linear


@dataclass(frozen=True, kw_only=True)
class Phi3(Mistral):
    """Fused projections; a longrope is refused, and so are heads that are rotated in part."""

    rms_norm_eps: float = 1e-5

    model_type = "phi3"
    architecture = "Phi3ForCausalLM"
    ignored: ClassVar[tuple[str, ...]] = ("original_max_position_embeddings",)

    def attention_names(self) -> Mapping[str, Name]:
        kept = {name: ATTENTION[name] for name in ("attention_norm", "output")}
        return kept | {"query_key_value": "self_attn.qkv_proj.weight"}

    def mlp_names(self) -> Mapping[str, Name]:
        kept = {name: MLP[name] for name in ("mlp_norm", "down")}
        return kept | {"gate_up": "mlp.gate_up_proj.weight"}

    def project(self, layer: dict, x: Hidden) -> tuple[Flat, Flat, Flat]:
        query = self.num_attention_heads * self.head_dim
        key = query + self.num_key_value_heads * self.head_dim
        fused = linear(layer, "query_key_value", x)
        return fused[:, :query], fused[:, query:key], fused[:, key:]

    def mlp(self, layer: dict, x: Hidden) -> Hidden:
        gate, up = jnp.split(linear(layer, "gate_up", x), 2, axis=-1)
        return linear(layer, "down", jax.nn.silu(gate) * up)

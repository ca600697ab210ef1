"""Phi-3: Mistral whose checkpoints have the projections that families/fused.py makes of others'."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pagedattn_serving.families.decoder import Name

from .llama import ATTENTION, MLP
from .mistral import Mistral


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

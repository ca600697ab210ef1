"""Granite: Llama with multipliers, of the embedding, in attention, of branches and of logits."""

from dataclasses import dataclass

from pagedattn import AttentionSpec
from pagedattn_serving.families.decoder import Hidden, Logits, Tokens

from .llama import Llama


@dataclass(frozen=True, kw_only=True)
class Granite(Llama):
    """Llama with four multipliers."""

    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    model_type = "granite"
    architecture = "GraniteForCausalLM"

    def attention_spec(self, index: int) -> AttentionSpec:
        del index
        return AttentionSpec(scale=self.attention_multiplier)

    def embed(self, params: dict, tokens: Tokens) -> Hidden:
        return self.embedding_multiplier * super().embed(params, tokens)

    def branch(self, layer: dict, name: str, x: Hidden) -> Hidden:
        return self.residual_multiplier * super().branch(layer, name, x)

    def logits(self, params: dict, hidden: Hidden) -> Logits:
        return super().logits(params, hidden) / self.logits_scaling

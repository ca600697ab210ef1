"""BLOOM: ALiBi instead of positions, layer norms with biases, one fused projection."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pagedattn import AttentionSpec, alibi_slopes
from pagedattn_serving.families.decoder import Decoder, Heads, Hidden, Logits, Tokens

from .pieces import biases, gelu_tanh, head_logits, layer_norm, linear

WEIGHTS = {
    "attention_norm": "input_layernorm.weight",
    "query_key_value_by_head": "self_attention.query_key_value.weight",
    "output": "self_attention.dense.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "up": "mlp.dense_h_to_4h.weight",
    "down": "mlp.dense_4h_to_h.weight",
}
OUTER_WEIGHTS = {
    "embedding": "transformer.word_embeddings.weight",
    "embedding_norm": "transformer.word_embeddings_layernorm.weight",
    "norm": "transformer.ln_f.weight",
}
ANY_LENGTH = 1 << 30  # ALiBi has no last position


@dataclass(frozen=True, kw_only=True)
class Bloom(Decoder):
    """ALiBi with the standard slopes; every weight has a bias."""

    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True

    model_type = "bloom"
    architecture = "BloomForCausalLM"
    base_prefix = "transformer."
    layer_prefix = "transformer.h.{}."
    renamed: ClassVar[Mapping[str, str]] = {
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_embed": "hidden_size",
    }
    ignored: ClassVar[tuple[str, ...]] = (
        "attention_softmax_in_fp32",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "offset_alibi",
        "seq_length",
        "skip_bias_add",
        "slow_but_exact",
    )

    @classmethod
    def read(cls, raw: dict) -> dict:
        num_heads = raw["num_attention_heads"]
        sizes = {"num_key_value_heads": num_heads, "head_dim": raw["hidden_size"] // num_heads}
        return raw | sizes | {"max_position_embeddings": ANY_LENGTH}

    def outer_names(self) -> dict[str, str]:
        names = OUTER_WEIGHTS | biases(OUTER_WEIGHTS, "embedding_norm", "norm")
        return names if self.tie_word_embeddings else names | {"lm_head": "lm_head.weight"}

    def layer_names(self, index: int) -> dict[str, str]:
        del index
        return WEIGHTS | biases(WEIGHTS, *WEIGHTS)

    def attention_spec(self, index: int) -> AttentionSpec:
        del index
        return AttentionSpec(alibi_slopes=alibi_slopes(self.num_attention_heads))

    def norm(self, x: Hidden, tensors: dict, name: str) -> Hidden:
        return layer_norm(x, tensors[name], tensors[f"{name}_bias"], self.layer_norm_epsilon)

    def embed(self, params: dict, tokens: Tokens) -> Hidden:
        return self.norm(params["embedding"][tokens], params, "embedding_norm")

    def heads(
        self, index: int, layer: dict, hidden: Hidden, positions: Tokens
    ) -> tuple[Heads, Heads, Heads]:
        del index, positions  # ALiBi brings them in, in attention
        fused = linear(layer, "query_key_value_by_head", self.norm(hidden, layer, "attention_norm"))
        fused = fused.reshape(len(hidden), self.num_attention_heads, 3, self.head_dim)
        return fused[:, :, 0], fused[:, :, 1], fused[:, :, 2]

    def rest(self, layer: dict, hidden: Hidden, attended: Hidden) -> Hidden:
        hidden = hidden + linear(layer, "output", attended)
        x = linear(layer, "up", self.norm(hidden, layer, "mlp_norm"))
        return hidden + linear(layer, "down", gelu_tanh(x))

    def logits(self, params: dict, hidden: Hidden) -> Logits:
        hidden = self.norm(hidden, params, "norm")
        return head_logits(params, hidden)

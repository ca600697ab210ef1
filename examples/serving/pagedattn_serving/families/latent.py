"""Multi-head latent attention: of each token the cache has one latent, whatever the heads.

A head's keys and values are linear maps of the latent. Neither is ever made: the map of the keys is
applied to the query, and that of the values to what attention gives, which is the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp

from pagedattn import AttentionSpec, KVCache, init_latent_cache
from pagedattn_serving.families.decoder import Heads, Hidden, Name, Tokens, Values, scales_for

from .llama import Llama
from .pieces import Weight, biases, linear, rms_norm
from .rotary import Yarn, paired_apart

QUERY = {"query": "self_attn.q_proj.weight"}
LOW_RANK_QUERY = {
    "query_down": "self_attn.q_a_proj.weight",
    "query_norm": "self_attn.q_a_layernorm.weight",
    "query_up": "self_attn.q_b_proj.weight",
}
LATENT = {
    "attention_norm": "input_layernorm.weight",
    "latent_down": "self_attn.kv_a_proj_with_mqa.weight",
    "latent_norm": "self_attn.kv_a_layernorm.weight",
    "latent_up": "self_attn.kv_b_proj.weight",
    "output": "self_attn.o_proj.weight",
}
LOW_RANK_EPS = 1e-6  # of the norms between two projections, whatever the config says


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Llama):
    """Llama with heads of two parts: one by way of latents, and one that rotates, with one key.

    `head_dim` is that of the part that rotates, as in transformers.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool = True

    @classmethod
    def read(cls, raw: dict) -> dict:
        return super().read(raw | {"head_dim": raw["qk_rope_head_dim"]})

    def attention_names(self) -> Mapping[str, Name]:
        query = QUERY if self.q_lora_rank is None else LOW_RANK_QUERY
        biased = query.keys() & {"query_down"} | {"latent_down", "output"}
        names = LATENT | query
        return names | (biases(names, *biased) if self.attention_bias else {})

    def init_cache(self, num_blocks: int, block_size: int, dtype) -> KVCache:
        width = self.kv_lora_rank + self.qk_rope_head_dim
        sizes = num_blocks, block_size, width, self.kv_lora_rank
        return init_latent_cache(*sizes, dtype, scales=scales_for(dtype))

    def attention_spec(self, index: int) -> AttentionSpec:
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        if isinstance(self.rope_scaling, Yarn):
            scale *= self.rope_scaling.grown(self.rope_scaling.mscale_all_dim) ** 2
        return replace(super().attention_spec(index), scale=scale)

    def heads(
        self, index: int, layer: dict, hidden: Hidden, positions: Tokens
    ) -> tuple[Heads, Heads, Values]:
        x = self.norm(layer, "attention_norm", hidden)
        nope, rope = jnp.split(self.queries(layer, x), [self.qk_nope_head_dim], axis=-1)
        down = linear(layer, "latent_down", x)[:, None]
        latent, key = jnp.split(down, [self.kv_lora_rank], axis=-1)
        latent = rms_norm(latent, layer["latent_norm"], LOW_RANK_EPS)
        absorbed = jnp.einsum("thn,hnl->thl", nope, self.ups(layer)[0])
        rope, key = (self.rotate(index, part, positions) for part in (rope, key))
        query, key = (jnp.concatenate(x, axis=-1) for x in ((absorbed, rope), (latent, key)))
        return query, key, latent

    def queries(self, layer: dict, x: Hidden) -> Heads:
        if self.q_lora_rank is not None:
            x = rms_norm(linear(layer, "query_down", x), layer["query_norm"], LOW_RANK_EPS)
        query = linear(layer, "query" if self.q_lora_rank is None else "query_up", x)
        return query.reshape(len(x), self.num_attention_heads, -1)

    def ups(self, layer: dict) -> list[Weight]:
        """What makes keys of latents, and values: `[num_heads, head_dim, kv_lora_rank]`."""
        by_head = layer["latent_up"].reshape(self.num_attention_heads, -1, self.kv_lora_rank)
        return jnp.split(by_head, [self.qk_nope_head_dim], axis=1)

    def rotate(self, index: int, heads: Heads, positions: Tokens) -> Heads:
        heads = paired_apart(heads) if self.rope_interleave else heads
        return super().rotate(index, heads, positions)

    def rest(self, layer: dict, hidden: Hidden, attended: Hidden) -> Hidden:
        latents = attended.reshape(len(attended), -1, self.kv_lora_rank)
        values = jnp.einsum("thl,hvl->thv", latents, self.ups(layer)[1])
        return super().rest(layer, hidden, values.reshape(len(values), -1))

"""Attention of an encoder-decoder model by a torch layer, on caches that JAX allocated.

    python examples/encoder_decoder.py

The encoder, the prompts, their cross-attention and a decode step run through a layer; no tensor is
copied on its way. Exit status 1: a result differs from JAX's on the same memory.
"""

# pyright: reportUnknownMemberType=false

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from pagedattn_interop import to_jax, to_torch
from torch import Tensor

from pagedattn import AttentionSpec, KVCache, init_kv_cache, paged_attention, ragged_attention
from pagedattn_torch import TorchSDPABackendImpl, TorchSDPAMetadata

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 2, 64, 16
ENCODER_LENS, PROMPT_LENS, TABLES = [37, 50, 9], [5, 1, 18], [[0, 1], [2, 3], [4, 5]]
CROSS_TABLES = [[8, 9, 10], [11, 12, 13, 14], [15]]
LAYER = TorchSDPABackendImpl(NUM_HEADS, HEAD_DIM, num_kv_heads=NUM_KV_HEADS)
Rows = tuple[Array, Array | None, Array | None]  # query, and key and value unless cached


def normal(seed: int, num_tokens: int) -> tuple[Array, Array, Array]:
    """New queries, keys and values."""
    one, two, three = jax.random.split(jax.random.key(seed), 3)
    shape = num_tokens, NUM_KV_HEADS, HEAD_DIM
    query = jax.random.normal(one, (num_tokens, NUM_HEADS, HEAD_DIM))
    return query, jax.random.normal(two, shape), jax.random.normal(three, shape)


def metadata(new: list[int], cached: list[int]) -> TorchSDPAMetadata:
    encoder = {"encoder_lens": ENCODER_LENS, "cross_block_tables": CROSS_TABLES}
    return TorchSDPAMetadata.from_lists(new, cached, TABLES, block_size=BLOCK_SIZE, **encoder)


def by_jax(kind: str, arrays: Rows, cache: KVCache[Array], meta: TorchSDPAMetadata) -> Array:
    """The same call, over the cache that the layer has just written."""
    query, key, value = arrays
    spec = AttentionSpec(causal=kind == "decoder")
    if kind == "encoder" and key is not None and value is not None:  # there is no cache
        starts = jnp.cumsum(jnp.array([0, *ENCODER_LENS]))
        rows = query, key, value
        return ragged_attention(*rows, starts, starts, spec, max_query_len=50, max_key_len=50)
    tensors: KVCache[Tensor] = to_torch(cache)
    written: KVCache[Array] = to_jax(tensors, copy=True)  # before the layer writes again
    return paged_attention(query, written, to_jax(meta.to_batch(BLOCK_SIZE, kind)), spec)


def differs(kind: str, arrays: Rows, cache: KVCache[Array], meta: TorchSDPAMetadata) -> float:
    """How far the layer's result, by torch, is from JAX's."""
    key, value = (None if array is None else to_torch(array) for array in arrays[1:])
    out = LAYER.forward(to_torch(arrays[0]), key, value, to_torch(cache), meta, attn_type=kind)
    return float(np.abs(np.asarray(to_jax(out)) - by_jax(kind, arrays, cache, meta)).max())


def main() -> int:
    sizes = (16, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, jnp.float32)
    own, cross = init_kv_cache(*sizes), init_kv_cache(*sizes)  # torch writes there: ours alone
    prompts, steps = metadata(PROMPT_LENS, [0, 0, 0]), metadata([1, 1, 1], PROMPT_LENS)
    encoder, decoder, step = normal(0, 96), normal(1, 24), normal(2, 3)
    calls = {
        "encoder": ("encoder", encoder, own, prompts),
        "prompts": ("decoder", decoder, own, prompts),
        "their cross-attention": ("encoder_decoder", (decoder[0], *encoder[1:]), cross, prompts),
        "decode": ("decoder", step, own, steps),
        "its cross-attention": ("encoder_decoder", (step[0], None, None), cross, steps),
    }
    gaps = {name: differs(*call) for name, call in calls.items()}
    print(*(f"{name}: |torch - jax| {gap:.1e}" for name, gap in gaps.items()), sep="\n")
    return int(max(gaps.values()) > 1e-5)


if __name__ == "__main__":
    raise SystemExit(main())

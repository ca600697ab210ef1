"""What the numbers of caches are, by vLLM's words for `--kv-cache-dtype`."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pagedattn import KVCache
from pagedattn_serving.families.decoder import Decoder

CACHE_DTYPES = {
    "auto": None,  # that of the model
    "int4": "int4",
    "int8": "int8",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def cache_dtype(kv_cache_dtype: str, dtype: DTypeLike) -> DTypeLike:
    """The dtype that a word means for a model of a dtype; ValueError if it means none."""
    if kv_cache_dtype not in CACHE_DTYPES:
        raise ValueError(
            f"expected a kv_cache_dtype of {', '.join(CACHE_DTYPES)}, got {kv_cache_dtype!r}"
        )
    return CACHE_DTYPES[kv_cache_dtype] or dtype


def bytes_of_token(model: Decoder, dtype: DTypeLike) -> float:
    """What a token takes of the caches of all layers, in bytes, with its scales."""
    block_size = 16
    layer = jax.eval_shape(lambda: model.init_cache(1, block_size, dtype))
    return len(model.windows) * _num_bytes(layer) / block_size


def _num_bytes(cache: KVCache) -> int:
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(cache))


def more_tokens(model: Decoder, kv_cache_dtype: str, dtype: DTypeLike) -> str:
    """How many more tokens fit into the same memory, as a line."""
    held = cache_dtype(kv_cache_dtype, dtype)
    plain, few = (bytes_of_token(model, each) for each in (dtype, held))
    return (
        f"keys and values in {held} take {few:.0f} bytes a token: {plain / few:.2f} times as many "
        f"fit as in {jnp.dtype(dtype).name}"
    )

"""What a cache in eight bits costs a model, against the same model on float32.

    python examples/quantised_cache.py

Held-out text goes through the model as in serving: keys and values are written to the cache,
rounded, and read from it. The scales are those of the keys and values of other text: the largest of
each KV head, over the largest that the dtype holds.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from pagedattn_serving.checkpoint.folder import SHIPPED, load_checkpoint
from pagedattn_serving.families.forward import forward_paged
from pagedattn_serving.training.corpus import split_topics

from pagedattn import KVCache, init_kv_cache, make_batch

WINDOWS, LENGTH, BLOCK_SIZE = 8, 512, 16
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def main() -> dict[str, tuple[float, float, float]]:
    """By dtype the share of next tokens that agree, and the logits' mean and largest difference."""
    model, params = load_checkpoint(SHIPPED)
    tables = np.arange(WINDOWS * LENGTH // BLOCK_SIZE).reshape(WINDOWS, -1)
    batch = make_batch([LENGTH] * WINDOWS, [0] * WINDOWS, tables, block_size=BLOCK_SIZE)
    other, held_out = (text[: WINDOWS * LENGTH].astype(jnp.int32) for text in split_topics())
    heads = model.num_key_value_heads, model.head_dim

    def caches(dtype, calibrated):
        """One a layer, empty, with the scales that the caches of the other text ask for."""
        size = (tables.size, BLOCK_SIZE, *heads)
        each = (scales_of(cache, dtype) for cache in calibrated)
        return [init_kv_cache(*size, dtype, key_scale=k, value_scale=v) for k, v in each]

    @functools.partial(jax.jit, static_argnames="of")
    def run(params, tokens, caches, of=model):
        hidden, caches = forward_paged(params, of, tokens, caches, batch)
        return of.logits(params, hidden).astype(jnp.float32), caches

    nothing = [None] * model.num_hidden_layers
    _, calibrated = run(params, other, caches("float32", nothing))
    want, _ = run(params, held_out, caches("float32", nothing))
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    got = {"bfloat16": run(rounded, held_out, caches("bfloat16", nothing))[0]}
    for dtype in LARGEST:
        got[dtype], _ = run(params, held_out, caches(dtype, calibrated))
    return {dtype: differences(logits, want) for dtype, logits in got.items()}


def scales_of(cache: KVCache | None, dtype: str) -> list[jax.Array | None]:
    """Of keys and of values, a scale for each KV head of what a cache holds; none without one."""
    if cache is None:
        return [None, None]
    return [abs(plane).max((0, 1, 3)) / LARGEST[dtype] for plane in cache.planes]


def differences(got: jax.Array, want: jax.Array) -> tuple[float, float, float]:
    agree, gap = got.argmax(1) == want.argmax(1), abs(got - want)
    return float(agree.mean()), float(gap.mean()), float(gap.max())


if __name__ == "__main__":
    print("cache           next tokens alike   logits differ by   at most")
    for dtype, (agree, mean, most) in main().items():
        print(f"{dtype:<15} {agree:>17.2%}   {mean:>16.4f}   {most:>7.2f}")

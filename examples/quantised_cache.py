"""What a cache in eight bits costs the shipped model, against the same model on float32.

    python examples/quantised_cache.py

Held-out text goes through the model token by token in no other way than in serving: keys and values
are written to the cache, rounded, and read from it. The scales are those of the keys and values of
other text: the largest of each KV head, over the largest that the dtype holds.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from pagedattn_serving.checkpoint.folder import SHIPPED, load_checkpoint
from pagedattn_serving.families.forward import forward_paged
from pagedattn_serving.training.corpus import split_topics
from rich.console import Console
from rich.table import Table

from pagedattn import init_kv_cache, make_batch

WINDOWS, LENGTH, BLOCK_SIZE = 8, 512, 16
LARGEST = {"float8_e4m3fn": 448, "float8_e5m2": 57344, "int8": 127}  # what a dtype holds


def main() -> dict[str, tuple[float, float, float]]:
    """For each dtype the share of next tokens that agree, and the logits' differences."""
    model, params = load_checkpoint(SHIPPED)
    training, held_out = split_topics()
    batch = windows_of_text()
    score = jax.jit(functools.partial(scores, model))
    size = (model.num_key_value_heads, model.head_dim)

    def caches(dtype, scales=({},) * model.num_hidden_layers):
        num_blocks = WINDOWS * LENGTH // BLOCK_SIZE
        return [init_kv_cache(num_blocks, BLOCK_SIZE, *size, dtype, **scale) for scale in scales]

    _, calibrated = score(params, windows(training), caches(jnp.float32), batch)
    want, _ = score(params, windows(held_out), caches(jnp.float32), batch)
    results = {}
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    got, _ = score(rounded, windows(held_out), caches(jnp.bfloat16), batch)
    results["bfloat16"] = differences(np.asarray(got, np.float32), np.asarray(want))
    for dtype in LARGEST:
        scales = [scales_of(cache, dtype) for cache in calibrated]
        got, _ = score(params, windows(held_out), caches(dtype, scales), batch)
        results[dtype] = differences(np.asarray(got), np.asarray(want))
    return results


def windows(text):
    """The first windows of a text, packed."""
    return text[: WINDOWS * LENGTH].astype(jnp.int32)


def windows_of_text():
    """The batch of all windows at once, each a sequence without a context."""
    tables = np.arange(WINDOWS * LENGTH // BLOCK_SIZE).reshape(WINDOWS, -1)
    return make_batch([LENGTH] * WINDOWS, [0] * WINDOWS, tables, block_size=BLOCK_SIZE)


def scores(model, params, tokens, caches, batch):
    hidden, caches = forward_paged(params, model, tokens, caches, batch)
    return model.logits(params, hidden), caches


def scales_of(cache, dtype) -> dict:
    """A scale for each KV head, from what a cache of floats holds."""
    planes = {"key_scale": cache.key, "value_scale": cache.value}
    return {name: abs(plane).max((0, 1, 3)) / LARGEST[dtype] for name, plane in planes.items()}


def differences(got, want) -> tuple[float, float, float]:
    agree = (got.argmax(1) == want.argmax(1)).mean()
    return float(agree), float(abs(got - want).mean()), float(abs(got - want).max())


if __name__ == "__main__":
    table = Table("cache", "next tokens alike", "logits differ by", "at most")
    for dtype, (agree, mean, most) in main().items():
        table.add_row(dtype, f"{agree:.2%}", f"{mean:.4f}", f"{most:.2f}")
    Console().print(table)

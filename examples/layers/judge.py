"""Compares a stack of layers that runs over a paged cache with float64, and looks at its memory."""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from layers.growing import feed
from layers.sizes import (
    BLOCK_SIZE,
    HEAD_DIM,
    NUM_BLOCKS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    NUM_PAIRS,
    SIZE,
    SPECS,
)
from pagedattn import init_kv_cache
from pagedattn.testing import reference_attention

LENS = (19, 21, 14, 30)
Weights = list[dict[str, np.ndarray]]


def weights_of(layers: Iterable, matrix: Callable) -> Weights:
    """Those of all layers, from the stacked ones of a pair; `matrix` reads a projection's."""
    names = "query", "key", "value", "output"
    stacked = [{n: np.asarray(matrix(getattr(layer, n))) for n in names} for layer in layers]
    pairs = range(NUM_PAIRS)
    return [{n: m[index] for n, m in each.items()} for index in pairs for each in stacked]


def judge(step: Callable, weights: Weights) -> int:
    """Feeds sequences to `step` and prints how far they are from float64; 0 if all is well.

    `weights` has the four matrices of each layer, `[in, out]`.
    """
    rng = np.random.default_rng(0)
    sequences = [rng.normal(size=(length, SIZE)).astype(np.float32) for length in LENS]
    num_blocks = NUM_LAYERS * NUM_BLOCKS
    cache = init_kv_cache(num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, jnp.float32)
    before = cache.key.unsafe_buffer_pointer()
    with jax.default_matmul_precision("highest"):  # a GPU would multiply float32 with ten bits
        outputs, cache = feed(step, cache, sequences)
    in_place = cache.key.unsafe_buffer_pointer() == before
    error = max(map(relative_error, outputs, (by_oracle(weights, x) for x in sequences)))
    print(f"largest difference from float64: {error:.1e}; cache updated in place: {in_place}")
    return 0 if error < 1e-5 and in_place else 1


def by_oracle(weights: Weights, x) -> np.ndarray:
    """The output of the layers for one whole sequence `x`, `[length, size]`, in float64."""
    x = np.asarray(x, np.float64)
    for layer, spec in zip(weights, SPECS * NUM_PAIRS, strict=True):
        query, key, value = (
            (x @ np.asarray(layer[name], np.float64)).reshape(len(x), -1, HEAD_DIM)
            for name in ("query", "key", "value")
        )
        one_block = key[None], value[None], [[0]], [len(x)], [0, len(x)]
        out, _ = reference_attention(query, *one_block, spec)
        x = x + out.reshape(len(x), -1) @ np.asarray(layer["output"], np.float64)
    return x


def relative_error(out: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(out - exact).max() / np.abs(exact).max())

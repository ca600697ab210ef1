"""One release of the library, timed in a process of its own, by what all releases have.

Each line that it reads is a batch to prepare, `{"query_lens": ..., "seq_lens": ...}`, or asks for
the seconds of a layer, the mean of so many calls of LAYERS, `{"calls": ...}`.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pagedattn

BLOCK, HEADS, KV_HEADS, HEAD_DIM = 16, 32, 8, 128
LAYERS = 8


def prepare(query_lens: list[int], seq_lens: list[int]) -> Callable:
    """Layers of attention of bfloat16 in one jax.jit, by the backend that the release chooses."""
    blocks = sum(seq_lens) // BLOCK
    places = np.random.default_rng(0).permutation(blocks)
    ends = np.cumsum(seq_lens) // BLOCK
    tables = [part.tolist() for part in np.split(places, ends[:-1])]
    context = np.subtract(seq_lens, query_lens).tolist()
    batch = pagedattn.make_batch(query_lens, context, tables, block_size=BLOCK)
    shapes = (sum(query_lens), HEADS, HEAD_DIM), *[(blocks, BLOCK, KV_HEADS, HEAD_DIM)] * 2
    keys = jax.random.split(jax.random.key(0), 3)
    made = (jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True))
    query, key, value = made
    cache = pagedattn.KVCache(key, value)

    @jax.jit
    def layers(query, cache, batch):
        for _ in range(LAYERS):
            query = pagedattn.paged_attention(query, cache, batch)
        return query

    return lambda: layers(query, cache, batch)


def serve() -> None:
    """Answers each line of stdin with one of stdout."""
    call: Any = None
    for line in sys.stdin:
        asked, answer = json.loads(line), {"version": pagedattn.__version__}
        try:
            if calls := asked.get("calls"):
                start = time.perf_counter()
                outs = [call() for _ in range(calls)]
                jax.block_until_ready(outs)
                answer["seconds"] = (time.perf_counter() - start) / calls / LAYERS
            elif asked:
                call = None  # frees what the last one holds
                call = prepare(**asked)
                jax.block_until_ready(call())
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()

"""Times a layer of decode by our kernel in a jit of several: small calls, caches of eight bits.

    PYTHONPATH=examples python -m benchmarks.cpu_layers [-o docs/results]

On one thread and on all, in turns with sums of as many bytes as keys and values of bfloat16 have:
in a row, and block by block in the order of a table. The figures are added to the report of cpu.py.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
import torch
from numba import njit, prange, set_num_threads

from benchmarks.case import HEAD_DIM, HEADS, KV_HEADS
from benchmarks.cpu_threads import on_threads
from benchmarks.machine import write
from pagedattn import KVCache, make_batch, paged_attention

SHAPES = {"decode 4x64": [64] * 4, "decode 8x4096": [4096] * 8}
DTYPES = "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"
BLOCK, LAYERS, ROUNDS = 16, 16, 30
PAUSE = 0.01  # seconds in which the last one's threads stop waiting for more work


def layers_of(lens: list[int], dtype: str, threads: int, layers: int) -> Callable:
    """A call of so many layers over one cache; each layer's query is the result of the last."""
    rng = np.random.default_rng(0)
    num_blocks = sum(lens) // BLOCK
    values = rng.standard_normal((2, num_blocks, BLOCK, KV_HEADS, HEAD_DIM), np.float32)
    scale = jnp.float32(1 / 30) if dtype == "int8" else None
    cache = KVCache(*(jnp.asarray(values * 30 if dtype == "int8" else values).astype(dtype)))
    cache = KVCache(cache.key, cache.value, key_scale=scale, value_scale=scale)
    tables = rng.permutation(num_blocks).reshape(len(lens), -1)
    batch = make_batch([1] * len(lens), [n - 1 for n in lens], tables, block_size=BLOCK)
    query = jnp.asarray(rng.standard_normal((len(lens), HEADS, HEAD_DIM)), jnp.bfloat16)

    @jax.jit
    def call(query, cache, batch):
        with on_threads(threads):
            for _ in range(layers):
                query = paged_attention(query, cache, batch, backend="numba")
            return query

    return lambda: jax.block_until_ready(call(query, cache, batch))


def sum_of(num_bytes: int, threads: int) -> Callable:
    data = torch.ones(num_bytes // 4)

    def call():
        torch.set_num_threads(threads)
        data.sum()

    return call


def sum_of_blocks(lens: list[int], threads: int, layers: int) -> Callable:
    """What plain vector loads reach that read the blocks of a bfloat16 cache in a table's order."""
    num_blocks = sum(lens) // BLOCK
    planes = np.ones((2, num_blocks, BLOCK * KV_HEADS * HEAD_DIM // 2), np.float32)
    order = np.random.default_rng(0).permutation(num_blocks)

    def call():
        set_num_threads(threads)
        _add_blocks(planes, order, layers)

    return call


@njit(parallel=True, fastmath=True)
def _add_blocks(planes, order, layers):
    total = np.float32(0)
    for _ in range(layers):
        for i in prange(len(order)):
            for plane in range(2):
                total += planes[plane, order[i]].sum()
    return total


def figures(shape: str, threads: tuple[int, ...]) -> dict:
    """us a layer by dtype of the cache and threads, and of the sums."""
    lens = SHAPES[shape]
    num_bytes = sum(lens) * 2 * KV_HEADS * HEAD_DIM * 2
    layers = LAYERS if num_bytes < 1 << 24 else 1
    calls = {(d, n): layers_of(lens, d, n, layers) for d in DTYPES for n in threads}
    calls |= {("sum", n): sum_of(num_bytes, n) for n in threads}
    calls |= {("sum of blocks", n): sum_of_blocks(lens, n, layers) for n in threads}
    times: dict[tuple[str, int], list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            time.sleep(PAUSE)
            call()
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    us = {name: median(taken) * 1e6 for name, taken in times.items()}
    us = {(name, n): time / (1 if name == "sum" else layers) for (name, n), time in us.items()}
    return {name: {str(n): us[name, n] for n in threads} for name, _ in us}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--out", type=Path, help="folder of the report")
    path = parser.parse_args().out
    path = path and path / "cpu.json"
    data = json.loads(path.read_text()) if path else {}
    threads = 1, torch.get_num_threads()
    data["us_of_a_layer"] = {shape: figures(shape, threads) for shape in SHAPES}
    print(json.dumps(data["us_of_a_layer"], indent=1))
    write(path, data)


if __name__ == "__main__":
    main()

"""Times our kernel on a CPU over caches of every kind, beside one of bfloat16.

    PYTHONPATH=examples JAX_PLATFORMS=cpu python -m benchmarks.cpu_caches [-o cpu_caches.json]

Kinds take turns; a figure is the median of turns, with bfloat16 queries, in jax.jit.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import machine
from benchmarks.case import HEAD_DIM, HEADS, HEADS_SAID, KV_HEADS
from benchmarks.chosen import chosen
from benchmarks.turns import in_turns, of_arrays
from pagedattn import KVCache, init_kv_cache, make_batch, paged_attention, write_kv

BLOCK, CALLS = 16, 4  # tokens of a block; calls of a turn
DTYPES = "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"
KINDS: dict[str, tuple[str, Literal["head", "token"]]] = {name: (name, "head") for name in DTYPES}
KINDS |= {f"{name}, per-token scales": (name, "token") for name in DTYPES[1:]}
KINDS["int4"] = ("int4", "token")
SHAPES = {
    "decode 8x4096": ([1] * 8, [4096] * 8),
    "decode 64x512": ([1] * 64, [512] * 64),
    "verify 8x(8 on 4096)": ([8] * 8, [4096] * 8),
    "prefill 1x2048": ([2048], [2048]),
    "prefill 4x512": ([512] * 4, [512] * 4),
}


def cache_of(num_blocks: int, dtype: str, scales: Literal["head", "token"]) -> KVCache:
    """A cache of normal numbers, whose scales of heads fit numbers up to 4."""
    given = {}
    if scales == "head" and dtype != "bfloat16":
        most = float((jnp.iinfo if dtype == "int8" else jnp.finfo)(dtype).max)
        given = dict.fromkeys(("key_scale", "value_scale"), jnp.float32(4 / most))
    sizes = num_blocks, BLOCK, KV_HEADS, HEAD_DIM
    cache = init_kv_cache(*sizes, dtype=dtype, scales=scales, **given)
    rows = np.random.default_rng(0).standard_normal((2, cache.num_slots, KV_HEADS, HEAD_DIM), "f4")
    return jax.jit(write_kv)(cache, *jnp.asarray(rows, jnp.bfloat16), jnp.arange(cache.num_slots))


def turn(shape: str, kind: str) -> Callable[[], float]:
    """`seconds()` of a call, the mean of a turn."""
    query_lens, seq_lens = SHAPES[shape]
    num_blocks = sum(seq_lens) // BLOCK
    rng = np.random.default_rng(1)
    tables = rng.permutation(num_blocks).reshape(len(seq_lens), -1)
    context = np.subtract(seq_lens, query_lens).tolist()
    batch = make_batch(query_lens, context, tables, block_size=BLOCK)
    query = rng.standard_normal((sum(query_lens), HEADS, HEAD_DIM), "f4")
    run = jax.jit(partial(paged_attention, backend="numba"))
    seconds = of_arrays(
        run, jnp.asarray(query, jnp.bfloat16), cache_of(num_blocks, *KINDS[kind]), batch
    )
    seconds()
    return lambda: mean(seconds() for _ in range(CALLS))


def over(us: float | str, base: float | str) -> str:
    """A time over another one, or why there is none."""
    return f"{us / base:8.3f}" if isinstance(us, float) and isinstance(base, float) else f"{us}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("-k", "--only", default="", help="shapes whose name contains this")
    given = parser.parse_args()
    shapes = chosen(parser, given.only, SHAPES)
    report: dict = {"machine": machine.cpu(HEADS_SAID), "us": {}}
    print(json.dumps(report["machine"]))
    for shape in shapes:
        report["us"][shape] = found = in_turns(partial(turn, shape), KINDS)
        print(f"{shape}: bfloat16 {found['bfloat16']} us, and over it")
        for kind, us in found.items():
            print(f"  {kind:34}{over(us, found['bfloat16'])}", flush=True)
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

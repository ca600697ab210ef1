"""What options cost or gain on one GPU: fewer bits, sinks, shared prefixes, latent caches.

    export PYTHONPATH=examples:. XLA_PYTHON_CLIENT_PREALLOCATE=false
    python -m benchmarks.options [-o docs/results/options.json] [-k decode]

Each is attention of bfloat16 queries in `jax.jit`, of 64 sequences unless it says otherwise, beside
the same without the option; `RATIOS` says what is compared. Few keys are read by `triton` in a CUDA
graph of torch: in `jax.jit` the host's time for so many short layers would be timed.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks import caches, latent_caches
from benchmarks.caches import HEADS, LENGTH, SEQS, Timed, planes, queries, timed
from benchmarks.chosen import chosen
from benchmarks.machine import caption, machine, write
from benchmarks.random_arrays import BLOCK_SIZE, random_cache, random_decodes
from pagedattn import cascade_attention, make_batch, paged_attention, split_prefix

SHARED, OWN = 8192, 128


def sinks() -> Timed:
    call = partial(paged_attention, sinks=jnp.zeros(HEADS, jnp.float32))
    cache = random_cache(planes(SEQS * LENGTH))
    return timed(call, queries(), cache, random_decodes(SEQS, LENGTH), SEQS * LENGTH)


def behind_prefix(call: Callable, **options) -> Timed:
    prefix, own = SHARED // BLOCK_SIZE, OWN // BLOCK_SIZE
    tables = [
        [*range(prefix), *range(prefix + i * own, prefix + i * own + own)] for i in range(SEQS)
    ]
    batch = make_batch([1] * SEQS, [SHARED + OWN - 1] * SEQS, tables, block_size=BLOCK_SIZE)
    cache = random_cache(planes(SHARED + SEQS * OWN))
    return timed(call, queries(), cache, batch, SHARED + SEQS * OWN, **options)


def cascade(query, cache, batch):
    return cascade_attention(query, cache, *batch)[0]


WORK: dict[str, Callable[[], Timed]] = {
    **caches.WORK,
    "decode, sinks": sinks,
    "shared prefix": partial(behind_prefix, paged_attention),
    "shared prefix, cascade_attention": partial(behind_prefix, cascade, prepare=split_prefix),
    **latent_caches.WORK,
}
RATIOS = {**caches.RATIOS, "decode, sinks": ("decode",), **latent_caches.RATIOS}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("-k", "--only", default="", help="work whose name contains this")
    arguments = parser.parse_args()
    names = chosen(parser, arguments.only, WORK)
    if jax.default_backend() != "gpu":
        parser.error("JAX finds no GPU; benchmarks.cpu times a CPU")
    about = machine()
    print(caption(about))
    rows = {}
    for name in names:
        try:
            rows[name] = WORK[name]()._asdict()
        except Exception as error:
            rows[name] = {"refused": str(error).partition("\n")[0]}
        print(f"{name:44}{rows[name]}", flush=True)
        write(arguments.out, {"machine": about, "work": rows})
    for name, others in RATIOS.items():
        times = {each: rows.get(each, {}).get("microseconds") for each in (name, *others)}
        for other in others:
            if other != name and times[name] and times[other]:
                print(f"{name:44}{times[name] / times[other]:6.2f} of the time of {other}")


if __name__ == "__main__":
    main()

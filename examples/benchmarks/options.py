"""What options cost or gain on one GPU: eight bits, sinks, shared prefixes, latent caches.

    export PYTHONPATH=examples:. XLA_PYTHON_CLIENT_PREALLOCATE=false
    python -m benchmarks.options [-o docs/results/options.json]

Each is a decode of 64 sequences in bfloat16 in `jax.jit`, beside the same without the option.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.machine import caption, machine, write
from benchmarks.random_arrays import BLOCK_SIZE, random_cache, random_decodes
from benchmarks.timing import LAYERS, captured, layers_of, seconds_a_call, time_enqueued
from pagedattn import KVCache, cascade_attention, make_batch, paged_attention, split_prefix

SEQS, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 64, 4096, 32, 8, 128
SHARED, OWN = 8192, 128
LATENT, VALUES, LATENT_HEADS = 576, 512, 128


class Timed(NamedTuple):
    """Microseconds of a call, and the bytes of keys and values that it must read."""

    microseconds: float
    read: int


def timed(call: Callable, query, cache, batch, num_keys: int, prepare=lambda batch: batch) -> Timed:
    """`prepare` makes of a batch, once for all layers, what the call is given."""
    layers = layers_of(call)
    program = jax.jit(lambda query, cache, batch: layers(query, cache, prepare(batch)))
    seconds = seconds_a_call(lambda: program(query, cache, batch)) / LAYERS
    slots = cache.num_blocks * cache.block_size
    held = sum(plane.nbytes for plane in cache.planes)
    return Timed(seconds * 1e6, held * num_keys // slots)


def planes(num_keys: int) -> tuple[int, ...]:
    """The shape of the keys, and of the values, of a cache with room for so many."""
    return num_keys // BLOCK_SIZE, BLOCK_SIZE, KV_HEADS, HEAD_DIM


def queries(heads: int = HEADS, size: int = HEAD_DIM):
    return jax.random.normal(jax.random.key(1), (SEQS, heads, size), jnp.bfloat16)


def decode(dtype) -> Timed:
    cache = random_cache(planes(SEQS * LENGTH), dtype)
    return timed(paged_attention, queries(), cache, random_decodes(SEQS, LENGTH), SEQS * LENGTH)


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


def latent(backend: str) -> Timed:
    """A latent cache of which the first columns are the values.

    Out is as narrow as they are: the next call waits for one element of it, in its queries.
    """
    shape = SEQS * LENGTH // BLOCK_SIZE, BLOCK_SIZE, 1, LATENT
    key = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)

    def call(query, cache, batch):
        out = paged_attention(query, cache, batch, backend=backend)
        return query.at[0, 0, 0].set(out[0, 0, 0])

    cache = KVCache(key, None, value_dim=VALUES)
    query = queries(LATENT_HEADS, LATENT)
    return timed(call, query, cache, random_decodes(SEQS, LENGTH), SEQS * LENGTH)


def latent_by_peer(name: str) -> Timed:
    """A peer's time in a CUDA graph, with pages of 64."""
    from benchmarks.peers import latents, missing  # the other figures need no torch

    if cure := missing(name):
        raise ImportError(f"{name} is not installed: {cure}")
    work = latents.Latents(SEQS, LENGTH, LATENT_HEADS, (VALUES, LATENT - VALUES))
    call = latents.LATENTS[name](work)
    work.require(call(0))
    microseconds = time_enqueued(captured(call, LAYERS).replay) / LAYERS
    return Timed(microseconds, 2 * SEQS * LENGTH * LATENT)


WORK = {
    "decode": partial(decode, jnp.bfloat16),
    "decode, float8_e4m3fn": partial(decode, jnp.float8_e4m3fn),
    "decode, float8_e5m2": partial(decode, jnp.float8_e5m2),
    "decode, int8": partial(decode, jnp.int8),
    "decode, sinks": sinks,
    "shared prefix": partial(behind_prefix, paged_attention),
    "shared prefix, cascade_attention": partial(behind_prefix, cascade, prepare=split_prefix),
    "latent cache, sdpa": partial(latent, "sdpa"),
    "latent cache, triton": partial(latent, "triton"),
    "latent cache, FlashInfer": partial(latent_by_peer, "FlashInfer"),
    "latent cache, FlashMLA": partial(latent_by_peer, "FlashMLA"),
    "latent cache, mosaic": partial(latent, "mosaic"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("-k", "--only", default="", help="work whose name contains this")
    arguments = parser.parse_args()
    names = [name for name in WORK if arguments.only in name]
    about = machine()
    print(caption(about))
    rows = {}
    for name in names:
        try:
            rows[name] = WORK[name]()._asdict()
        except Exception as error:
            rows[name] = {"refused": str(error).partition("\n")[0]}
        print(f"{name:34}{rows[name]}", flush=True)
    write(arguments.out, {"machine": about, "work": rows})


if __name__ == "__main__":
    main()

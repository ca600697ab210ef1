"""What options cost or gain on one GPU: fewer bits, sinks, shared prefixes, latent caches.

    export PYTHONPATH=examples:. XLA_PYTHON_CLIENT_PREALLOCATE=false
    python -m benchmarks.options [-o docs/results/options.json] [-k decode]

Each is attention of bfloat16 queries in `jax.jit`, of 64 sequences unless it says otherwise, beside
the same without the option; `RATIOS` says what is compared. Few keys are read by `triton` in a CUDA
graph of torch: in `jax.jit` the host's time for so many short layers would be timed.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.chosen import chosen
from benchmarks.machine import caption, machine, write
from benchmarks.random_arrays import BLOCK_SIZE, random_array, random_cache, random_decodes
from benchmarks.timing import (
    L2_BYTES,
    LAYERS,
    after,
    captured,
    in_place,
    layers_of,
    seconds_a_call,
    time_enqueued,
)
from pagedattn import (
    KVCache,
    cascade_attention,
    init_kv_cache,
    init_latent_cache,
    make_batch,
    paged_attention,
    split_prefix,
    write_kv,
)
from pagedattn.extend import cdiv

SEQS, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 64, 4096, 32, 8, 128
SHARED, OWN = 8192, 128
LATENT, VALUES, LATENT_HEADS = 576, 512, 128
LATENT_LAYERS = 32  # for which what follows from lengths is computed once


class Timed(NamedTuple):
    """Microseconds of a call, and the bytes of keys and values that it must read."""

    microseconds: float
    read: int


def timed(call: Callable, query, cache, batch, num_keys: int, prepare=lambda batch: batch) -> Timed:
    """`prepare` makes of a batch, once for all layers, what the call is given."""

    def layer(query, given):
        cache, batch = given
        return call(query, cache, prepare(batch))

    seconds = seconds_a_call(layers_of(layer, query, [(cache, batch)])) / LAYERS
    return Timed(seconds * 1e6, held(cache) * num_keys // cache.num_slots)


def held(cache: KVCache) -> int:
    """Bytes of a cache, its scales among them."""
    return sum(array.nbytes for array in cache.by_slot.values())


def planes(num_keys: int) -> tuple[int, ...]:
    """The shape of the keys, and of the values, of a cache with room for so many."""
    return num_keys // BLOCK_SIZE, BLOCK_SIZE, KV_HEADS, HEAD_DIM


def queries(heads: int = HEADS, size: int = HEAD_DIM, tokens: int = SEQS):
    return jax.random.normal(jax.random.key(1), (tokens, heads, size), jnp.bfloat16)


def cache_of(num_keys: int, dtype, scales: Any) -> KVCache:
    """A cache of random keys and values, of fewer bits with scales of heads or of tokens."""
    if scales == "head":
        cache = random_cache(planes(num_keys), dtype)
        few, scale = jnp.dtype(dtype).itemsize == 1, jnp.float32(0.5)
        return replace(cache, key_scale=scale, value_scale=scale) if few else cache
    cache = init_kv_cache(*planes(num_keys), dtype=dtype, scales=scales)
    return filled(cache, HEAD_DIM, HEAD_DIM)


def filled(cache: KVCache, *columns: int) -> KVCache:
    """A cache with random rows in every slot."""

    @partial(jax.jit, donate_argnums=0)
    def fill(cache):
        shape, keys = (cache.num_slots, cache.num_kv_heads), jax.random.split(jax.random.key(0))
        rows = [random_array(key, (*shape, n)) for key, n in zip(keys, columns, strict=False)]
        value = rows[1] if len(rows) > 1 else None
        return write_kv(cache, rows[0], value, jnp.arange(cache.num_slots))

    return fill(cache)


class Layers(NamedTuple):
    """Decodes that read keys of their own, as those of a model do: the L2 has none of them."""

    query: jax.Array
    operands: list[tuple]  # cache and batch, some of which layers take in turn
    count: int
    read: int  # bytes of one


def decodes(dtype, scales="head", seqs=SEQS, length=LENGTH) -> Layers:
    one = seqs * held(cache_of(length, dtype, scales))
    parts = cdiv(L2_BYTES, one)
    cache = cache_of(parts * seqs * length, dtype, scales)
    tables = random_decodes(parts * seqs, length).block_tables.reshape(parts, seqs, -1)
    lens = [1] * seqs, [length - 1] * seqs
    operands = [(cache, make_batch(*lens, rows, block_size=BLOCK_SIZE)) for rows in tables]
    return Layers(queries(tokens=seqs), operands, max(LAYERS, parts), one)


def decode(*kind) -> Timed:
    query, operands, count, read = decodes(*kind)
    call = layers_of(lambda query, part: paged_attention(query, *part), query, operands, count)
    return Timed(1e6 * seconds_a_call(call) / count, read)


def decode_in_graph(*kind) -> Timed:
    import pagedattn_interop  # the other figures need no torch

    import pagedattn_torch

    layers = decodes(*kind)
    query, operands = pagedattn_interop.to_torch((layers.query, layers.operands))

    def call(index):
        part = operands[index % len(operands)]
        return pagedattn_torch.paged_attention(query, *part, backend="triton")

    graph = captured(call, layers.count)
    return Timed(time_enqueued(graph.replay) / layers.count, layers.read)


def long_queries(
    dtype, scales="head", seqs=2, query_len=8192, context=0, backend: str | None = None
) -> Timed:
    """Prompts, or chunks behind a context."""
    length = context + query_len
    cache, query = cache_of(seqs * length, dtype, scales), queries(tokens=seqs * query_len)
    tables = random_decodes(seqs, length).block_tables
    batch = make_batch([query_len] * seqs, [context] * seqs, tables, block_size=BLOCK_SIZE)
    call = partial(paged_attention, backend=backend)
    return timed(call, query, cache, batch, seqs * length)


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


def latent(
    backend: str | None,
    dtype=jnp.bfloat16,
    seqs: int = SEQS,
    length: int = LENGTH,
    heads: int = LATENT_HEADS,
) -> Timed:
    """A latent cache of which the first columns are the values.

    Out is narrower than the queries: each layer has queries of its own, and gives its out.
    """
    sizes = seqs * length // BLOCK_SIZE, BLOCK_SIZE, LATENT, VALUES
    scales = None if dtype == jnp.bfloat16 else "token"
    cache = filled(init_latent_cache(*sizes, dtype, scales=scales), LATENT)
    batch, layers = random_decodes(seqs, length), [queries(heads, LATENT, seqs)] * LATENT_LAYERS

    def program(layers, cache, batch):
        pairs = (after(query, cache) for query in layers)
        return [paged_attention(*pair, batch, backend=backend) for pair in pairs]

    seconds = seconds_a_call(in_place(program, layers, cache, batch)) / LATENT_LAYERS
    return Timed(seconds * 1e6, held(cache))


def latent_by_peer(
    name: str, seqs: int = SEQS, length: int = LENGTH, heads: int = LATENT_HEADS
) -> Timed:
    """A peer's time in a CUDA graph, with pages of 64."""
    from benchmarks.peers import latents, missing  # the other figures need no torch

    if cure := missing(name):
        raise ImportError(f"{name} is not installed: {cure}")
    work = latents.Latents(seqs, length, heads, (VALUES, LATENT - VALUES))
    call = latents.LATENTS[name](work)
    work.require(call(0))
    microseconds = time_enqueued(captured(call, LAYERS).replay) / LAYERS
    return Timed(microseconds, 2 * seqs * length * LATENT)


TOKENS = ", scales of tokens"
KINDS = {
    "": (jnp.bfloat16, "head"),
    ", float8_e4m3fn": (jnp.float8_e4m3fn, "head"),
    ", float8_e5m2": (jnp.float8_e5m2, "head"),
    ", int8": (jnp.int8, "head"),
    f", float8_e4m3fn{TOKENS}": (jnp.float8_e4m3fn, "token"),
    f", int8{TOKENS}": (jnp.int8, "token"),
    ", int4": ("int4", "token"),
}
FEW_KINDS = "", ", int8", f", int8{TOKENS}", ", int4"
EIGHT_BITS = ", float8_e4m3fn", ", int8", f", float8_e4m3fn{TOKENS}", f", int8{TOKENS}"
SMALL = {"decode, 1 x 1024": (1, 1024), "decode, 8 x 1024": (8, 1024)}
LONG = {"prompts, 2 x 8192": (2, 8192, 0), "chunks, 128 on 4096": (64, 128, 4096)}
# Sequences, keys of each, and query heads: DeepSeek's 128 on one GPU, on two, four, and eight.
LATENTS = (
    *((128, 1024, 128), (16, 8192, 128), (64, 4096, 64)),
    *((64, 4096, 16), (128, 1024, 16), (16, 8192, 16), (64, 4096, 32)),
)
LATENT_CALLS = {
    "": partial(latent, None, jnp.bfloat16),
    ", triton": partial(latent, "triton", jnp.bfloat16),
    ", mosaic": partial(latent, "mosaic", jnp.bfloat16),
    ", triton, float8_e4m3fn": partial(latent, "triton", jnp.float8_e4m3fn),
    ", mosaic, float8_e4m3fn": partial(latent, "mosaic", jnp.float8_e4m3fn),
    ", FlashMLA": partial(latent_by_peer, "FlashMLA"),
}
WORK: dict[str, Callable[[], Timed]] = {
    **{f"decode{name}": partial(decode, *kind) for name, kind in KINDS.items()},
    **{
        f"{work}{name}": partial(decode_in_graph, *KINDS[name], *sizes)
        for work, sizes in SMALL.items()
        for name in FEW_KINDS
    },
    **{
        f"{work}{name}": partial(long_queries, *KINDS[name], *sizes)
        for work, sizes in LONG.items()
        for name in ("", *EIGHT_BITS, ", int4")
    },
    **{
        f"{work}{name}, triton": partial(long_queries, *KINDS[name], *sizes, backend="triton")
        for work, sizes in LONG.items()
        for name in EIGHT_BITS
    },
    "decode, sinks": sinks,
    "shared prefix": partial(behind_prefix, paged_attention),
    "shared prefix, cascade_attention": partial(behind_prefix, cascade, prepare=split_prefix),
    "latent cache, sdpa": partial(latent, "sdpa"),
    "latent cache, triton": partial(latent, "triton"),
    "latent cache, FlashInfer": partial(latent_by_peer, "FlashInfer"),
    "latent cache, FlashMLA": partial(latent_by_peer, "FlashMLA"),
    "latent cache, mosaic": partial(latent, "mosaic"),
    "latent cache, triton, float8_e4m3fn": partial(latent, "triton", jnp.float8_e4m3fn),
    "latent cache, triton, int8": partial(latent, "triton", jnp.int8),
    **{
        f"latent cache, {seqs} x {length}, {heads} heads{name}": partial(call, seqs, length, heads)
        for seqs, length, heads in LATENTS
        for name, call in LATENT_CALLS.items()
    },
}
# Beside which work each stands, where both were timed: of several names, of each.
RATIOS = {
    **{f"decode{name}": ("decode", "decode, float8_e4m3fn") for name in KINDS},
    **{f"{work}{name}": (work,) for work in SMALL for name in FEW_KINDS},
    **{f"{work}{name}": (work, f"{work}{name}, triton") for work in LONG for name in KINDS},
    "decode, sinks": ("decode",),
    "latent cache, triton, float8_e4m3fn": ("latent cache, triton", "latent cache, mosaic"),
    "latent cache, triton, int8": ("latent cache, triton", "latent cache, mosaic"),
    **{
        f"latent cache, {seqs} x {length}, {heads} heads, mosaic, float8_e4m3fn": (
            f"latent cache, {seqs} x {length}, {heads} heads, mosaic",
        )
        for seqs, length, heads in LATENTS
    },
}


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
    for name, others in RATIOS.items():
        times = {each: rows.get(each, {}).get("microseconds") for each in (name, *others)}
        for other in others:
            if other != name and times[name] and times[other]:
                print(f"{name:44}{times[name] / times[other]:6.2f} of the time of {other}")
    write(arguments.out, {"machine": about, "work": rows})


if __name__ == "__main__":
    main()

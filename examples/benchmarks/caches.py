"""Times decodes and long queries over caches of all kinds, for `benchmarks.options`."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.random_arrays import BLOCK_SIZE, random_array, random_cache, random_decodes
from benchmarks.timing import L2_BYTES, LAYERS, captured, layers_of, seconds_a_call, time_enqueued
from pagedattn import KVCache, init_kv_cache, make_batch, paged_attention, write_kv
from pagedattn.extend import cdiv

SEQS, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 64, 4096, 32, 8, 128
TOKENS = ", per-token scales"
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
LONG = {
    "prompts, 2 x 8192": (2, 8192, 0),
    "chunks, 128 on 4096": (64, 128, 4096),
    "chunks, 1024 on 8192": (8, 1024, 8192),
}


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

    # What JAX still had to do, on another thread, would end the recording.
    layers = jax.block_until_ready(decodes(*kind))
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
}
# Beside which work each stands, where both were timed: of several names, of each.
RATIOS = {
    **{f"decode{name}": ("decode", "decode, float8_e4m3fn") for name in KINDS},
    **{f"{work}{name}": (work,) for work in SMALL for name in FEW_KINDS},
    **{f"{work}{name}": (work, f"{work}{name}, triton") for work in LONG for name in KINDS},
}

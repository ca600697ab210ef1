"""Times decodes over latent caches, ours and a peer's, for `benchmarks.options`."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp

from benchmarks.caches import LENGTH, SEQS, Timed, filled, held, queries
from benchmarks.random_arrays import BLOCK_SIZE, random_decodes
from benchmarks.timing import LAYERS, after, captured, in_place, seconds_a_call, time_enqueued
from pagedattn import init_latent_cache, paged_attention

LATENT, VALUES, LATENT_HEADS = 576, 512, 128
LATENT_LAYERS = 32  # for which what follows from lengths is computed once


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
    "latent cache, sdpa": partial(latent, "sdpa"),
    "latent cache, triton": partial(latent, "triton"),
    "latent cache, FlashInfer": partial(latent_by_peer, "FlashInfer"),
    "latent cache, FlashMLA": partial(latent_by_peer, "FlashMLA"),
    "latent cache, mosaic": partial(latent, "mosaic"),
    "latent cache, mosaic, float8_e4m3fn": partial(latent, "mosaic", jnp.float8_e4m3fn),
    "latent cache, triton, float8_e4m3fn": partial(latent, "triton", jnp.float8_e4m3fn),
    "latent cache, triton, int8": partial(latent, "triton", jnp.int8),
    **{
        f"latent cache, {seqs} x {length}, {heads} heads{name}": partial(call, seqs, length, heads)
        for seqs, length, heads in LATENTS
        for name, call in LATENT_CALLS.items()
    },
}
RATIOS = {
    "latent cache, triton, float8_e4m3fn": ("latent cache, triton", "latent cache, mosaic"),
    "latent cache, triton, int8": ("latent cache, triton", "latent cache, mosaic"),
    "latent cache, mosaic, float8_e4m3fn": ("latent cache, mosaic",),
    **{
        f"latent cache, {seqs} x {length}, {heads} heads, mosaic, float8_e4m3fn": (
            f"latent cache, {seqs} x {length}, {heads} heads, mosaic",
        )
        for seqs, length, heads in LATENTS
    },
}

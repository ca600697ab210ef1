"""Programs around the kernels, as XLA compiles them for an H200: `make test-hopper`, without a GPU.

What is checked shows only in what XLA has made of a program: which kernels became parts of fusions
with the slices around them, and what is copied.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from h200 import compiled, in_place_within_fusions, mesh_of, sizes_of_copies
from jax.sharding import PartitionSpec

from pagedattn import AttentionSpec, paged_attention, write_kv
from pagedattn.testing import batch_of, cache_of, random_problem

LAYERS = 3
FUSING = {"xla_gpu_enable_dynamic_slice_fusion": True}  # JAX's default from 0.11 on
SPEC = AttentionSpec(scale=0.07)
HEADS = PartitionSpec(None, "heads")
GROUPED = {"head_dim": 128, "num_heads": 8, "num_kv_heads": 4}
LATENT = {"head_dim": 576, "value_dim": 512, "latent": True, "num_heads": 128, "num_kv_heads": 1}
DECODES, CHUNKS = ([1, 1, 1], [300, 5, 4000]), ([300, 1, 40], [300, 5, 400])


class Kind(NamedTuple):
    backend: str
    lengths: tuple[list[int], list[int]]
    sizes: dict[str, Any]
    pages: PartitionSpec = PartitionSpec(None, None, "heads")  # how the cache is spread


KINDS = {
    "triton, decodes": Kind("triton", DECODES, GROUPED),
    "triton, chunks": Kind("triton", CHUNKS, GROUPED),
    "triton, latents": Kind("triton", DECODES, LATENT, PartitionSpec()),
    "mosaic, decodes": Kind("mosaic", DECODES, GROUPED),
    "mosaic, chunks": Kind("mosaic", CHUNKS, GROUPED),
    "mosaic, latents": Kind("mosaic", DECODES, LATENT, PartitionSpec()),
    "mosaic, latents of few heads": Kind(
        "mosaic", DECODES, LATENT | {"num_heads": 32}, PartitionSpec()
    ),
    "mosaic, latents of eight bits": Kind(
        "mosaic",
        DECODES,
        LATENT | {"num_heads": 32, "cache_dtype": "float8_e4m3fn", "token_scales": True},
        PartitionSpec(),
    ),
    "mosaic, trees": Kind("mosaic", CHUNKS, GROUPED | {"parents": True}),
    "mosaic, short trees": Kind("mosaic", ([8, 1, 3], [300, 5, 4000]), GROUPED | {"parents": True}),
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))


EIGHT_BITS = {
    f"{name}, {dtype}, scales of {'tokens' if tokens else 'heads'}": Kind(
        "mosaic",
        lengths,
        GROUPED | {"cache_dtype": dtype} | ({"token_scales": True} if tokens else {}),
    )
    for name, lengths in {"decodes": DECODES, "chunks": CHUNKS}.items()
    for dtype, tokens in (("int8", True), ("float8_e4m3fn", True), ("float8_e5m2", False))
}


def arrays_of(kind):
    sizes = {"block_size": 16, "dtype": jnp.bfloat16} | kind.sizes
    problem = random_problem(*kind.lengths, SPEC, **sizes)
    return jnp.asarray(problem.query), cache_of(problem), batch_of(problem)


def attend(kind):
    def attention(query, cache, batch):
        return paged_attention(query, cache, batch, SPEC, backend=kind.backend, return_lse=True)

    return attention


def stacked(tree):
    return jax.tree.map(lambda array: jnp.stack([array] * LAYERS), tree)


def scanned(kind):
    """Layers whose caches lie in one array."""

    def layers(query, caches, batch):
        return jax.lax.scan(lambda _, cache: (0, attend(kind)(query, cache, batch)), 0, caches)[1]

    query, cache, batch = arrays_of(kind)
    return layers, query, stacked(cache), batch


def unrolled(kind):
    def layers(query, caches, batch):
        each = (jax.tree.map(lambda plane, i=i: plane[i], caches) for i in range(LAYERS))
        return [attend(kind)(query, cache, batch) for cache in each]

    query, cache, batch = arrays_of(kind)
    return layers, query, stacked(cache), batch


def batched(kind):
    query, *others = arrays_of(kind)
    return jax.vmap(attend(kind), (0, None, None)), stacked(query), *others


def differentiated(kind):
    def gradients(query, cache, batch):
        def total(query, cache):
            return attend(kind)(query, cache, batch)[0].astype(jnp.float32).sum()

        return jax.value_and_grad(total, (0, 1))(query, cache)

    return gradients, *arrays_of(kind)


def generating(kind):
    """Steps that write to the cache of each layer, and then attend to it."""

    def steps(query, caches, batch):
        key = jnp.zeros((len(query), *caches[0].key.shape[2:]), query.dtype)

        def step(_, carry):
            total, caches = carry
            caches = [
                write_kv(cache, key, None if cache.value is None else key, batch.slot_mapping)
                for cache in caches
            ]
            return total + sum(attend(kind)(query, cache, batch)[0] for cache in caches), caches

        total = jnp.zeros((*query.shape[:2], kind.sizes.get("value_dim", 128)), query.dtype)
        return jax.lax.fori_loop(0, 5, step, (total, caches))

    query, cache, batch = arrays_of(kind)
    return steps, query, [cache, jax.tree.map(jnp.copy, cache)], batch


ways = pytest.mark.parametrize("way", [scanned, unrolled, batched, differentiated, generating])


@kinds
@ways
def test_compiles(way, kind):
    assert "custom-call" in compiled(*way(kind)).as_text()


@pytest.mark.parametrize("kind", EIGHT_BITS.values(), ids=list(EIGHT_BITS))
def test_caches_in_eight_bits_compile(kind):
    """Four warpgroups have 128 registers each at first, which the assembler must make do with."""
    assert "custom-call" in compiled(*unrolled(kind)).as_text()


@ways
@pytest.mark.parametrize(
    "name", ["mosaic, decodes", "mosaic, latents", "mosaic, latents of few heads"]
)
def test_kernels_in_place_are_no_parts_of_fusions(way, name):
    """XLA drops the aliases of those that are: they would not find their operands."""
    text = compiled(*way(KINDS[name]), options=FUSING).as_text()
    assert "_aliasing=" in text
    assert in_place_within_fusions(text) == []


@kinds
def test_over_two_devices(kind):
    ins = HEADS, kind.pages, PartitionSpec()
    spread = jax.shard_map(attend(kind), mesh=mesh_of(2), in_specs=ins, out_specs=HEADS)
    text = compiled(spread, *arrays_of(kind), num_devices=2).as_text()
    assert not any(f" {name}(" in text for name in ("all-gather", "all-reduce", "all-to-all"))


@kinds
def test_donated_caches_are_written_where_they_are(kind):
    program, query, caches, batch = generating(kind)
    result = compiled(program, query, caches, batch, donate=(1,))
    planes = jax.tree.leaves(caches)
    donated = result.memory_analysis().alias_size_in_bytes
    assert donated >= sum(plane.nbytes for plane in planes)
    assert max(sizes_of_copies(result.as_text()), default=0) < min(plane.size for plane in planes)

"""The Mosaic kernels inside `jax.shard_map`, `jax.vmap` and loops: programs up to the assembler.

On a Hopper GPU their results too, by the oracle. With JAX 0.11 and 0.12 a kernel whose arguments
varied over an axis could not even be traced; one that JAX batched shared semaphores among the
batch, or had no rule for it.
"""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from mosaic_rules import BF16, hopper

from pagedattn import AttentionSpec
from pagedattn._dispatch.call import call_of
from pagedattn.backends.mosaic.dense import launch
from pagedattn.backends.mosaic.latents import launch as latents
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem

HEADS, PAGES = PartitionSpec(None, "heads"), PartitionSpec(None, None, "heads")
EVERYWHERE = PartitionSpec()
LATENT = {"head_dim": 576, "value_dim": 512, "latent": True, "num_heads": 128, "num_kv_heads": 1}
PLAIN = {"head_dim": 128, "num_heads": 8, "num_kv_heads": 4}


class Kind(NamedTuple):
    """One kernel's way of work."""

    backend: Any
    query_lens: list[int]
    seq_lens: list[int]
    sizes: dict[str, Any]
    pages: PartitionSpec = PAGES  # how the cache is spread
    in_place: int = 1  # kernels that write where they find operands: their semaphores


KINDS = {
    "keys cut over programs": Kind(launch, [1, 1, 1], [300, 5, 4000], PLAIN),
    "whole tiles": Kind(launch, [300, 1, 40], [300, 5, 400], PLAIN, in_place=0),
    "latents": Kind(latents, [1, 1, 1], [300, 5, 4000], LATENT, EVERYWHERE),
    "latents of few heads": Kind(
        latents, [1, 1, 1], [300, 5, 4000], LATENT | {"num_heads": 16}, EVERYWHERE
    ),
}
kinds = pytest.mark.parametrize("kind", KINDS)
BATCH = 23  # a size that nothing else has
LAYERS = 3


def problem_of(kind):
    """The problem of that kind, and attention as a function of its arrays, and these."""
    backend, query_lens, seq_lens, sizes, *_ = KINDS[kind]
    spec = AttentionSpec(scale=0.07)
    problem = random_problem(query_lens, seq_lens, spec, block_size=16, dtype=BF16, **sizes)

    def attend(query, cache, batch):
        call = call_of(query, cache, batch, spec, return_lse=True)
        return backend.attend(call, query, cache, batch, 132)

    return problem, attend, (jnp.asarray(problem.query), cache_of(problem), batch_of(problem))


def spread(kind):
    problem, attend, arrays = problem_of(kind)
    mesh = Mesh(np.array(jax.devices()[-1:]), "heads")
    specs = {"in_specs": (HEADS, KINDS[kind].pages, EVERYWHERE), "out_specs": HEADS}
    return problem, jax.jit(jax.shard_map(attend, mesh=mesh, **specs)), arrays


def batched(kind):
    """Of queries that are multiples of the problem's, over one cache."""
    problem, attend, (query, *others) = problem_of(kind)
    queries = jnp.stack([query * factor for factor in range(BATCH)])
    program = jax.jit(jax.vmap(lambda query: attend(query, *others)))
    return problem, program, (queries,)


def stacked(kind, program):
    """A program of layers whose caches lie in one array."""
    _, attend, (query, cache, batch) = problem_of(kind)
    caches = jax.tree.map(lambda plane: jnp.stack([plane * i for i in range(1, LAYERS + 1)]), cache)
    return jax.jit(
        lambda caches: program(lambda cache: attend(query, cache, batch), caches)
    ), caches


def scanned(attend, caches):
    return jax.lax.scan(lambda carry, cache: (carry, attend(cache)), 0, caches)[1]


def unrolled(attend, caches):
    layers = [jax.tree.map(lambda plane, i=i: plane[i], caches) for i in range(LAYERS)]
    results = [attend(cache) for cache in layers]
    return [jnp.stack(arrays) for arrays in zip(*results, strict=True)]


loops = pytest.mark.parametrize("loop", [scanned, unrolled])


def lowered(program, arrays):
    return program.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.lowers
@kinds
def test_lowers_in_shard_map(kind):
    _, program, arrays = spread(kind)
    text = lowered(program, arrays)
    assert text.count("@mosaic_gpu") == 1
    assert ("output_operand_alias" in text) == KINDS[kind].in_place


@pytest.mark.lowers
@kinds
def test_lowers_as_a_batch_in_shard_map(kind):
    _, attend, arrays = problem_of(kind)

    def twice(query, cache, batch):
        return jax.vmap(attend, (0, None, None))(jnp.stack([query, -query]), cache, batch)

    mesh = Mesh(np.array(jax.devices()[-1:]), "heads")
    specs = {"in_specs": (HEADS, KINDS[kind].pages, EVERYWHERE), "out_specs": PAGES}
    text = lowered(jax.jit(jax.shard_map(twice, mesh=mesh, **specs)), arrays)
    assert text.count("@mosaic_gpu") == 1


@pytest.mark.lowers
@kinds
def test_a_batch_is_a_loop(kind):
    _, program, arrays = batched(kind)
    kernels = [line for line in lowered(program, arrays).splitlines() if "@mosaic_gpu" in line]
    assert len(kernels) == 1
    assert not any(f"tensor<{BATCH}x" in line for line in kernels)


@pytest.mark.lowers
@kinds
@loops
def test_no_slice_becomes_part_of_a_kernel_in_place(loop, kind):
    """All that it reads but its semaphores, and all that it writes, lies behind barriers."""
    program, caches = stacked(kind, loop)
    text = lowered(program, (caches,))
    barriers = re.findall(r"(%\d+) = stablehlo.optimization_barrier (%[\w#]+)", text)
    before, behind = ({pair[i] for pair in barriers} for i in range(2))
    calls = re.findall(r"(%\d+):\d+ = stablehlo.custom_call @mosaic_gpu\w*\(([^)]*)\)(.*)", text)
    in_place = [call for call in calls if "output_operand_alias" in call[2]]
    assert len(in_place) == KINDS[kind].in_place
    for result, operands, _ in in_place:
        assert len(set(operands.split(", ")) - before) == 1
        uses = set(re.findall(rf"{result}#\d+", text))
        assert uses
        assert uses <= behind


@hopper
@kinds
def test_results_in_shard_map(kind):
    problem, program, arrays = spread(kind)
    assert_attention_close(*program(*arrays), problem, name="mosaic")


@hopper
@kinds
def test_results_of_a_batch(kind):
    problem, program, arrays = batched(kind)
    outs, lses = program(*arrays)
    assert_attention_close(outs[1], lses[1], problem, name="mosaic")
    _, attend, (query, *others) = problem_of(kind)
    for factor in range(BATCH):
        alone, _ = attend(query * factor, *others)
        np.testing.assert_array_equal(outs[factor], alone)


@hopper
@kinds
@loops
def test_results_of_stacked_caches(loop, kind):
    problem, attend, (query, _, batch) = problem_of(kind)
    program, caches = stacked(kind, loop)
    for junk in (0, 1):
        jnp.full(1 << 28, junk, jnp.int32).block_until_ready()  # what is left in the memory
        outs, lses = program(caches)
        assert_attention_close(outs[0], lses[0], problem, name="mosaic")
        for i, out in enumerate(outs):
            cache = jax.tree.map(lambda plane, i=i: plane[i], caches)
            np.testing.assert_array_equal(out, attend(query, cache, batch)[0])

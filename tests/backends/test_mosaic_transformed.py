"""The Mosaic kernels inside `jax.shard_map` and `jax.vmap`: programs up to the GPU's assembler.

On a Hopper GPU their results too, by the oracle. With JAX 0.11 and 0.12 a kernel whose arguments
varied over an axis could not even be traced; one that JAX batched shared semaphores among the
batch, or had no rule for it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from mosaic_rules import BF16, hopper

from pagedattn import AttentionSpec
from pagedattn.backends.mosaic import launch
from pagedattn.backends.mosaic.latents import launch as latents
from pagedattn.call import call_of
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
    kernels: int = 1


KINDS = {
    "keys cut over programs": Kind(launch, [1, 1, 1], [300, 5, 4000], PLAIN),
    "whole tiles": Kind(launch, [300, 1, 40], [300, 5, 400], PLAIN),
    "latents": Kind(latents, [1, 1, 1], [300, 5, 4000], LATENT, EVERYWHERE, 2),
}
kinds = pytest.mark.parametrize("kind", KINDS)
BATCH = 23  # a size that nothing else has


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
    mesh = Mesh(np.array(jax.devices()[:1]), "heads")
    specs = {"in_specs": (HEADS, KINDS[kind].pages, EVERYWHERE), "out_specs": HEADS}
    return problem, jax.jit(jax.shard_map(attend, mesh=mesh, **specs)), arrays


def batched(kind):
    """Of queries that are multiples of the problem's, over one cache."""
    problem, attend, (query, *others) = problem_of(kind)
    queries = jnp.stack([query * factor for factor in range(BATCH)])
    program = jax.jit(jax.vmap(lambda query: attend(query, *others)))
    return problem, program, (queries,)


def lowered(program, arrays):
    return program.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@kinds
def test_lowers_in_shard_map(kind):
    _, program, arrays = spread(kind)
    text = lowered(program, arrays)
    assert text.count("@mosaic_gpu") == KINDS[kind].kernels
    assert "output_operand_alias" in text or kind != "latents"  # their merge is in place


@kinds
def test_lowers_as_a_batch_in_shard_map(kind):
    _, attend, arrays = problem_of(kind)

    def twice(query, cache, batch):
        return jax.vmap(attend, (0, None, None))(jnp.stack([query, -query]), cache, batch)

    mesh = Mesh(np.array(jax.devices()[:1]), "heads")
    specs = {"in_specs": (HEADS, KINDS[kind].pages, EVERYWHERE), "out_specs": PAGES}
    text = lowered(jax.jit(jax.shard_map(twice, mesh=mesh, **specs)), arrays)
    assert text.count("@mosaic_gpu") == KINDS[kind].kernels


@kinds
def test_a_batch_is_a_loop(kind):
    _, program, arrays = batched(kind)
    kernels = [line for line in lowered(program, arrays).splitlines() if "@mosaic_gpu" in line]
    assert len(kernels) == KINDS[kind].kernels
    assert not any(f"tensor<{BATCH}x" in line for line in kernels)


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

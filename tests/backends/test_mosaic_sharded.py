"""The Mosaic kernels inside `jax.shard_map`, and `jax.vmap`: programs up to the GPU's assembler.

On a Hopper GPU their results too, by the oracle. With JAX 0.11 and 0.12 a kernel whose arguments
varied over an axis could not even be traced.
"""

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

HEADS, PAGES, EVERYWHERE = (
    PartitionSpec(None, "heads"),
    PartitionSpec(None, None, "heads"),
    PartitionSpec(),
)
LATENT = {"head_dim": 576, "value_dim": 512, "latent": True, "num_heads": 128, "num_kv_heads": 1}
PLAIN = {"head_dim": 128, "num_heads": 8, "num_kv_heads": 4}
# Keys cut over programs, whole tiles, latents: kernels, and how the cache is spread.
KINDS = {
    "decode": (launch, [1, 1, 1], [300, 5, 4000], PLAIN, PAGES, 1),
    "prefill": (launch, [300, 1, 40], [300, 5, 400], PLAIN, PAGES, 1),
    "latents": (latents, [1, 1, 1], [300, 5, 4000], LATENT, EVERYWHERE, 2),
}
kinds = pytest.mark.parametrize("kind", KINDS)
mapped = pytest.mark.parametrize("mapped", [False, True], ids=["", "mapped"])


def spread(kind, mapped):
    """The problem of that kind, a function of its arrays inside shard_map, and these."""
    backend, query_lens, seq_lens, sizes, pages, _ = KINDS[kind]
    spec = AttentionSpec(scale=0.07)
    problem = random_problem(query_lens, seq_lens, spec, block_size=16, dtype=BF16, **sizes)
    arrays = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)

    def attend(query, cache, batch):
        call = call_of(query, cache, batch, spec, return_lse=True)
        return backend.attend(call, query, cache, batch, 132)

    def first_of_two(query, cache, batch):
        both = jax.vmap(attend, (0, None, None))(jnp.stack([query, -query]), cache, batch)
        return jax.tree.map(lambda results: results[0], both)

    mesh, specs = Mesh(np.array(jax.devices()[:1]), "heads"), (HEADS, pages, EVERYWHERE)
    function = first_of_two if mapped else attend
    program = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=HEADS)
    return problem, jax.jit(program), arrays


@mapped
@kinds
def test_it_lowers(kind, mapped):
    _, program, arrays = spread(kind, mapped)
    text = program.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == KINDS[kind][-1]
    assert "output_operand_alias" in text or kind != "latents"  # their merge is in place


@hopper
@mapped
@kinds
def test_results(kind, mapped):
    problem, program, arrays = spread(kind, mapped)
    assert_attention_close(*program(*arrays), problem, name="mosaic")

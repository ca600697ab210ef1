"""Decode steps of a whole model, as XLA compiles them for an H200."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from benchmarks.steps import filled
from h200 import compiled, kernels_of_loops, sizes_of_copies
from serving.families.llama import Llama
from serving.fused import fused
from serving.generation import decode_loop
from serving.initial import init_params

MODEL = Llama(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=1,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
)
# Of a layer: four products, attention, its merge where keys are split, and what XLA makes of the
# norms, residuals, RoPE, writes and the gate.
SIZES = {
    "mosaic": ([4096] * 64, 14),  # one sets semaphores to zero
    "triton, whole sequences": ([1024] * 256, 13),
    "triton, split keys": ([2048] * 8, 14),
    "one sequence": ([1024], 18),  # XLA takes a row apart further
}


def loop_of(layers: int, lengths: list[int]):
    """The compiled decode loop of a model of so many layers, and its caches."""
    model = replace(MODEL, num_hidden_layers=layers)

    def params():
        made = fused(init_params(model, jax.random.key(0)))
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), made)

    params = jax.eval_shape(params)
    state = jax.eval_shape(lambda: filled(model, params, lengths, 80))

    def run(params, state):
        return decode_loop(params, model, state, None, 24)

    return compiled(run, params, state, donate=(1,)), state.caches


@pytest.mark.parametrize(("lengths", "most"), SIZES.values(), ids=list(SIZES))
def test_layers_share_what_follows_from_the_batch(lengths, most):
    """A layer more starts its own kernels and no others."""
    programs = [loop_of(layers, lengths)[0] for layers in (2, 3)]
    (two,), (three,) = (kernels_of_loops(program.as_text()) for program in programs)
    assert 0 < three - two <= most


@pytest.mark.parametrize("lengths", [[4096] * 64, [1024]])
def test_caches_stay_where_they_are(lengths):
    program, caches = loop_of(2, lengths)
    sizes = [plane.size for plane in jax.tree.leaves(caches)]
    assert program.memory_analysis().alias_size_in_bytes >= 2 * sum(sizes)  # in bfloat16
    assert max(sizes_of_copies(program.as_text()), default=0) < min(sizes)

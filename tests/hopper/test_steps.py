"""Decode steps of a whole model, as XLA compiles them for an H200."""

from dataclasses import replace

import jax
import pytest

pytest.importorskip("safetensors")  # the models read checkpoints
from benchmarks.models import SHAPES, random_params
from benchmarks.whole_step import filled
from h200 import compiled, kernels_of_loops, sizes_of_copies
from pagedattn_serving.engine.generation import decode_loop

# Of a layer: four products, attention, its merge where keys are split, and what XLA makes of the
# norms, residuals, RoPE, writes and the gate.
SIZES = {
    "mosaic": ([4096] * 64, 14),  # one of them sets semaphores to zero
    "triton, whole sequences": ([1024] * 256, 13),
    "triton, split keys": ([2048] * 8, 14),
    "one sequence": ([1024], 18),  # XLA takes a row apart further
}


def loop_of(layers: int, lengths: list[int]):
    """The compiled decode loop of a model of so many layers, and its caches."""
    model = replace(SHAPES["llama-8b"], num_hidden_layers=layers)
    params = jax.eval_shape(lambda: random_params(model))
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

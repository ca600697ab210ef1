"""Sampler and trainer agree in every bit, over one memory; and the policy learns."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")

import rollout
from grpo.objective import advantages, logprobs
from pagedattn_serving.engine.engine import Engine
from pagedattn_serving.families.forward import forward_dense
from pagedattn_serving.training.initial import large_params


def test_a_short_run_learns_from_its_own_log_probabilities(capsys):
    assert rollout.main(updates=30) == 0
    printed = capsys.readouterr().out
    assert "0 bytes copied: True" in printed
    assert "log-probabilities: 0.0 batch-invariant" in printed
    first, *_, last = map(float, re.findall(r"reward (\S+)", printed))
    assert last > first + 0.05


@pytest.mark.usefixtures("exact_products")
def test_log_probabilities_of_the_trainer_are_those_of_a_dense_pass():
    params = large_params(rollout.MODEL, jax.random.key(1))
    tokens = np.random.default_rng(0).integers(24, size=(5, 9), dtype=np.int32)  # 4 a pass
    found = logprobs(params, rollout.MODEL, tokens, rollout.ROWS, batch_invariant=True)
    for row, of_row in zip(tokens, found, strict=True):
        hidden = forward_dense(params, rollout.MODEL, row[:-1])
        scores = jax.nn.log_softmax(rollout.MODEL.logits(params, hidden))
        np.testing.assert_allclose(of_row, scores[np.arange(8), row[1:]], atol=2e-4)


def test_advantages_are_relative_to_the_group():
    found = advantages(np.array([[0.0, 1.0], [5.0, 5.0]]))
    np.testing.assert_allclose(found, [-1, 1, 0, 0], atol=1e-3)


def test_new_weights_forget_the_prefixes_of_the_old_ones():
    prompt = tuple(range(9))
    request = rollout.Request(0, prompt, 4, rollout.Sampling(logprobs=0))
    old, new = (large_params(rollout.MODEL, jax.random.key(seed)) for seed in (1, 2))
    limits = replace(rollout.LIMITS, block_size=4)
    engine = Engine(old, rollout.MODEL, limits, batch_invariant=True)
    list(engine.stream([request]))
    engine.update_weights(new)
    fresh = Engine(new, rollout.MODEL, limits, batch_invariant=True)
    assert list(engine.stream([request])) == list(fresh.stream([request]))
    engine.submit(request)
    with pytest.raises(ValueError, match="finish or cancel"):
        engine.update_weights(old)

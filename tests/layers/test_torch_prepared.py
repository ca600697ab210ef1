"""What a step prepares once for its layers: the same results, and the work done once."""

import numpy as np
import pytest
import torch
from cases import SPECS, mixed
from hypothesis import given
from torch_layers import assert_same, layer_of, step_of

from pagedattn import InvalidInputError, UnsupportedError
from pagedattn.testing import random_problem
from pagedattn.testing.strategies import BUCKETS, problems
from pagedattn_torch import (
    TorchSDPABackendImpl,
    TorchSDPAMetadata,
    paged_attention,
    prepare,
    split_kv_cache,
)
from pagedattn_torch.backends import sdpa

pytestmark = pytest.mark.usefixtures("on_cpu")
DECODE = ([1, 1, 1], [17, 40, 1])


def small_steps(monkeypatch, counts):
    """Counts how often the sdpa backend works out a batch."""

    def counted(*arguments, plan=sdpa.parts.make_buckets):
        counts.append(arguments)
        return plan(*arguments)

    monkeypatch.setattr(sdpa.parts, "make_buckets", counted)


@given(problem=problems(bucket=BUCKETS[0], spec=SPECS["sliding_window"], dtype=np.float32))
def test_prepared_layers_give_what_others_give(problem):
    plain, kept = step_of(problem), step_of(problem)
    layer = layer_of(problem)
    layer.prepare(*kept)
    for _ in range(2):  # the second layer of the step, too
        assert_same(layer.forward(*kept), layer.forward(*plain))
        assert_same(kept.kv_cache, plain.kv_cache)


def test_layers_share_the_work_of_a_step(monkeypatch):
    counts = []
    small_steps(monkeypatch, counts)
    step = step_of(random_problem(*DECODE, SPECS["plain"]))
    layers = [TorchSDPABackendImpl(4, 16, num_kv_heads=2) for _ in range(5)]
    layers[0].prepare(*step)
    for layer in layers:
        layer.forward(*step)
    assert len(counts) == 1
    layers[0].prepare(*step)  # anew, as it says
    assert len(counts) == 2


OTHERS = {
    "formula": lambda step: (TorchSDPABackendImpl(4, 16, num_kv_heads=2, scale=0.5), step),
    "field": lambda step: (None, assigned(step)),
    "strides": lambda step: (
        None,
        step._replace(kv_cache=torch.stack([step.kv_cache] * 2, 5)[..., 0]),
    ),
}


def assigned(step):
    step.attn_metadata.max_decode_seq_len = 100
    return step


@pytest.mark.parametrize("name", OTHERS)
def test_another_call_is_prepared_anew(monkeypatch, name):
    counts = []
    small_steps(monkeypatch, counts)
    problem = random_problem(*DECODE, SPECS["plain"])
    step = step_of(problem)
    layer = layer_of(problem)
    layer.prepare(*step)
    other, changed = OTHERS[name](step)
    (other or layer).forward(*changed)
    assert len(counts) == 2


def test_a_step_that_cannot_be_prepared_leaves_nothing():
    step = step_of(mixed(SPECS["plain"]))
    layer = TorchSDPABackendImpl(4, 16, num_kv_heads=2)
    with pytest.raises(InvalidInputError, match="query"):
        layer.prepare(step.query[1:], *step[1:])
    before = step.kv_cache.clone()
    layer.prepare(*step)
    assert_same(step.kv_cache, before)


def test_functions_share_a_step_too():
    problem = random_problem(*DECODE, SPECS["plain"])
    step = step_of(problem)
    batch = step.attn_metadata.to_batch(4)
    cache = split_kv_cache(step.kv_cache, 2, 16)
    prepared = prepare(step.query, cache, batch, return_lse=True)
    for got, want in zip(
        prepared.attend(step.query, cache),
        paged_attention(step.query, cache, batch, return_lse=True),
        strict=True,
    ):
        assert_same(got, want)
    with pytest.raises(InvalidInputError, match="prepared for"):
        prepared.attend(step.query[:2], cache)
    with pytest.raises(UnsupportedError, match="gradients"):
        prepared.attend(step.query.clone().requires_grad_(), cache)


def test_metadata_made_twice_share_nothing():
    lists = ([1], [3], [[0]])
    first, second = (TorchSDPAMetadata.from_lists(*lists, block_size=4) for _ in range(2))
    x, cache = torch.ones(1, 16), torch.zeros(2, 1, 4, 2, 8)
    layer = TorchSDPABackendImpl(2, 8)
    layer.prepare(x, x, x, cache, first)
    assert vars(first)["_held"]
    assert not vars(second).get("_held")

"""A prepared step is for layers like the one that it was prepared with: others are refused."""

import dataclasses

import pytest
import torch

from pagedattn import InvalidInputError, KVCache, make_batch
from pagedattn_torch import prepare

BACKENDS = ("sdpa", "numba")
QUERY, PLANE = torch.ones(1, 2, 8), torch.ones(8, 4, 2, 8)
BATCH = make_batch([1], [20], [[1, 0, 3, 4, 5, 6]], block_size=4)
OTHER_LAYERS = {
    "no tensor": (None, KVCache(PLANE, PLANE)),
    "no cache": (QUERY, PLANE),
    "a query without axes": (torch.ones(()), KVCache(PLANE, PLANE)),
    "fewer blocks of values": (QUERY, KVCache(PLANE, PLANE[:2])),
    "values of another dtype": (QUERY, KVCache(PLANE, PLANE.to(torch.float64))),
    "values of other columns": (QUERY, KVCache(PLANE, PLANE.repeat(1, 1, 1, 2))),
    "values without axes": (QUERY, KVCache(PLANE, torch.ones(()))),
    "no values": (QUERY, KVCache(PLANE, None, value_dim=8)),
    "a scale": (QUERY, KVCache(PLANE, PLANE, key_scale=torch.ones(()))),
}


@pytest.mark.parametrize("other", OTHER_LAYERS)
@pytest.mark.parametrize("name", BACKENDS)
def test_layers_that_the_step_was_not_prepared_for_are_refused(name, other):
    """A kernel that trusts the step would read past the end of a smaller plane."""
    pytest.importorskip("numba")
    step = prepare(QUERY, KVCache(PLANE, PLANE), BATCH, backend=name)
    with pytest.raises(InvalidInputError):
        step.attend(*OTHER_LAYERS[other])
    out, _ = step.attend(QUERY, KVCache(PLANE.clone(), PLANE.clone()))
    assert torch.equal(out, torch.ones_like(out))


@pytest.mark.parametrize(
    "scale", [torch.zeros(()), torch.ones(3), torch.ones((), dtype=torch.int8)]
)
def test_scales_that_do_not_fit_are_refused(scale):
    plane = PLANE.to(torch.int8)
    cache = KVCache(plane, plane, torch.ones(()), torch.ones(()))
    step = prepare(QUERY, cache, BATCH, backend="sdpa")
    with pytest.raises(InvalidInputError, match="value_scale must be"):
        step.attend(QUERY, dataclasses.replace(cache, value_scale=scale))

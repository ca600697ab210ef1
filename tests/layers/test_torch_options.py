"""Options that are arrays, on torch tensors and in prepared steps."""

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases import SPECS, mixed
from pagedattn_interop import to_torch

from pagedattn import InvalidInputError, UnsupportedError
from pagedattn.testing import assert_attention_close, batch_of, cache_of
from pagedattn_torch import explain, paged_attention, prepare, select_backend


def tensors(problem):
    arrays = (jnp.asarray(problem.query), cache_of(problem))
    options = {name: jnp.asarray(array) for name, array in problem.arrays.items()}
    query, cache = to_torch(arrays, copy=True)
    return query, cache, batch_of(problem), to_torch(options, copy=True)


@pytest.mark.parametrize("names", [["sinks"], ["bias"], ["sinks", "bias"]])
@pytest.mark.parametrize("spec", ["plain", "all"])
def test_a_prepared_step_serves_layers_with_arrays_of_their_own(names, spec):
    problem = mixed(SPECS[spec], arrays=names, poison=None)
    query, cache, batch, options = tensors(problem)
    zeros = {name: torch.zeros_like(array) for name, array in options.items()}
    step = prepare(query, cache, batch, problem.spec, return_lse=True, **zeros)
    assert_attention_close(*step.attend(query, cache, **options), problem)
    other = problem.replace(**{name: array.cpu().numpy() for name, array in zeros.items()})
    assert_attention_close(*step.attend(query, cache, **zeros), other)
    with pytest.raises(InvalidInputError, match="prepared with"):
        step.attend(query, cache)


def test_choice_and_errors():
    problem = mixed(arrays=["sinks"])
    query, cache, batch, options = tensors(problem)
    assert select_backend(query, cache, batch, **options) in ("numba", "sdpa", "triton")
    assert explain(query, cache, batch, **options)["sdpa"] == []
    out = paged_attention(query, cache, batch, sinks=options["sinks"].bfloat16())
    assert out.shape == query.shape
    for bad in (torch.zeros(3), torch.zeros(4).int(), np.zeros(4, np.float32)):
        with pytest.raises(InvalidInputError, match="sinks"):
            paged_attention(query, cache, batch, sinks=bad)
    with pytest.raises(UnsupportedError, match="gradients"):
        paged_attention(query, cache, batch, sinks=torch.zeros(4, requires_grad=True))
    with pytest.raises(InvalidInputError, match="sinks must lie on"):
        paged_attention(query, cache, batch, sinks=torch.zeros(4, device="meta"))

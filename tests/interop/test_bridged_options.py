"""A torch backend for JAX arrays is asked for what the torch backend promises."""

import dataclasses

import jax
import pytest
from cases import good_call
from pagedattn_interop.backends import bridged

from pagedattn import UnsupportedError, paged_attention
from pagedattn_torch.backends import sdpa


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("has", [False, True])
def test_batch_invariant(has, jit):
    asked = []

    def spy(call, *arrays, **options):
        asked.append(call.batch_invariant)
        return sdpa.run(call, *arrays, **options)

    supports = sdpa.BACKEND.supports | ({"batch_invariant"} if has else set())
    torch_backend = dataclasses.replace(sdpa.BACKEND, name="spy", run=spy, supports=supports)
    query, cache, batch, spec = good_call()
    options = {"backend": bridged(torch_backend), "batch_invariant": True}

    def call(query, cache, batch):
        return paged_attention(query, cache, batch, spec, **options)

    call = jax.jit(call) if jit else call
    if has:
        call(query, cache, batch).block_until_ready()
        assert asked == [True]
    else:
        with pytest.raises(UnsupportedError, match="batch_invariant: spy does not have it"):
            call(query, cache, batch)

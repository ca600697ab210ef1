"""The sdpa backend on a GPU: right, eager and in jit, and never waiting for the device."""

import jax.numpy as jnp
import pytest

torch = pytest.importorskip("torch")
from cases import SPECS, mixed, run
from pagedattn_interop import to_torch

from pagedattn import AttentionSpec
from pagedattn._dispatch.call import call_of
from pagedattn.testing import assert_attention_close, batch_of, cache_of
from pagedattn_torch import arrays
from pagedattn_torch.backends import sdpa

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
ALL = SPECS | {"two-sided window": AttentionSpec(causal=False, sliding_window=4)}
DTYPES = ("float32", "float16", "bfloat16")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_against_the_oracle(name, dtype, mode):
    for head_dim in (16, 20):
        problem = mixed(ALL[name], dtype=jnp.dtype(dtype), head_dim=head_dim)
        assert_attention_close(*run(problem, "sdpa", mode), problem)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_never_waits_for_the_device(name, return_lse):
    """Torch raises at whatever synchronises; the first call may, to load things."""
    problem = mixed(ALL[name], dtype=jnp.dtype("bfloat16"))
    call = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    query, cache, batch = to_torch(call)
    batch = arrays.batch_on(batch, "cuda")
    args = query.cuda(), type(cache)(cache.key.cuda(), cache.value.cuda()), batch
    call = call_of(*args, problem.spec, return_lse)
    sdpa.run(call, *args[:2], sdpa.plan(call, batch))
    torch.cuda.set_sync_debug_mode("error")
    try:
        sdpa.run(call, *args[:2], sdpa.plan(call, batch))
    finally:
        torch.cuda.set_sync_debug_mode("default")

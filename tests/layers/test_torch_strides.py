"""Rows may have any strides, whichever backend runs."""

import jax
import jax.numpy as jnp
import pytest

torch = pytest.importorskip("torch")

from tensors import tensors
from test_torch_states import BY_TORCH, DEVICE
from torch_layers import normal, step_of

from pagedattn import AttentionSpec
from pagedattn.testing import batch_of, cache_of, random_problem
from pagedattn.testing.features import ARRAYS
from pagedattn_torch import (
    AttentionImpl,
    TorchSDPABackendImpl,
    explain,
    paged_attention,
    ragged_attention,
)

STRIDES = {
    "dense": torch.Tensor.contiguous,
    "transposed": lambda rows: rows.flatten(1).T.contiguous().T,
    "every second": lambda rows: rows.flatten(1).repeat_interleave(2, 1)[:, ::2],
    "one for all": lambda rows: rows[:1].expand(rows.shape),
}
LENGTHS = {
    "decodes": ([1, 1, 1], [9, 30, 4]),
    "mixed": ([5, 1, 7], [5, 12, 20]),
}


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("lens", LENGTHS)
@pytest.mark.parametrize("backend", BY_TORCH)
def test_rows_of_any_strides(backend, lens, strides):
    query, key, value, kv_cache, meta = step_of(random_problem(*LENGTHS[lens], AttentionSpec()))
    (_, num_heads, head_size), num_kv_heads = query.shape, key.shape[1]
    cls = type("Layer", (AttentionImpl,), {"backend": backend})
    layer = cls(num_heads, head_size, num_kv_heads=num_kv_heads)
    rows = [STRIDES[strides](x).view(x.shape) for x in (query, key, value)]
    got = layer.forward(*rows, kv_cache.clone(), meta)
    sdpa = TorchSDPABackendImpl(num_heads, head_size, num_kv_heads=num_kv_heads)
    want = sdpa.forward(*(x.contiguous() for x in rows), kv_cache.clone(), meta)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("backend", BY_TORCH)
def test_packed_keys_of_any_strides(backend, strides):
    rows = [normal(seed, 12, heads, 16).to(DEVICE) for seed, heads in enumerate((4, 2, 2))]
    starts = torch.tensor([0, 5, 12])
    lens = {"max_query_len": 7, "max_key_len": 7}
    rows = [STRIDES[strides](x).view(x.shape) for x in rows]
    got = ragged_attention(*rows, starts, starts, **lens, backend=backend)
    rows = [x.contiguous() for x in rows]
    want = ragged_attention(*rows, starts, starts, **lens, backend="sdpa")
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


def apart(array):
    """The same numbers, with others between them in memory."""
    return torch.stack([array, torch.full_like(array, 77)], -1)[..., 0]


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("backend", BY_TORCH)
def test_options_of_any_strides(backend, name):
    problem = random_problem(*LENGTHS["mixed"], AttentionSpec(), arrays=[name])
    call = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    call, option = tensors((call, jax.tree.map(jnp.asarray, problem.arrays[name])))
    if why := explain(*call, **{name: option})[backend]:
        pytest.skip("; ".join(why))
    want, got = (
        paged_attention(*call, backend=backend, **{name: given})
        for given in (option, jax.tree.map(apart, option))
    )
    torch.testing.assert_close(got, want, atol=0, rtol=0)

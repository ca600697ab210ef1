"""Tensors that lie on two devices, or are none: an error of ours, before anything is written."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from pagedattn_interop import to_torch, torch_call

from pagedattn import InvalidInputError, KVCache, make_batch
from pagedattn_torch import paged_attention, ragged_attention, write_kv_

BATCH = make_batch([2], [0], [[3]], block_size=4)
HERE, THERE = (torch.ones(2, 2, 16, device=device) for device in ("cpu", "meta"))


def cache(device):
    return KVCache(*(torch.zeros(8, 4, 2, 16, device=device) for _ in range(2)))


def test_a_query_lies_beside_its_cache():
    for query, held in ((THERE, cache("cpu")), (HERE, cache("meta"))):
        with pytest.raises(InvalidInputError, match="the cache's key must lie on the query's"):
            paged_attention(query, held, BATCH)


def test_a_cache_has_keys():
    with pytest.raises(InvalidInputError, match="the cache's key must be a torch tensor"):
        paged_attention(HERE, KVCache(None, cache("cpu").value), BATCH)


@pytest.mark.parametrize("name", ["key", "value"])
def test_keys_and_values_lie_beside_the_others(name):
    rows = {"key": HERE, "value": HERE} | {name: THERE}
    held = cache("cpu")
    with pytest.raises(InvalidInputError, match=f"{name} must lie on the cache's cpu"):
        write_kv_(held, **rows, slot_mapping=torch.arange(2))
    assert not held.key.any()
    assert not held.value.any()
    starts = torch.tensor([0, 2])
    with pytest.raises(InvalidInputError, match=f"{name} must lie on the query's cpu"):
        ragged_attention(HERE, **rows, query_start_loc=starts, key_start_loc=starts,
                         max_query_len=2, max_key_len=2)  # fmt: skip


@pytest.mark.parametrize("array", [np.ones(3), [1, 2], "x", 3.0])
def test_what_is_no_jax_array_is_not_crossed(array):
    with pytest.raises(InvalidInputError, match=r"to_torch expects jax\.Arrays.*torch\.as_tensor"):
        to_torch(array)


@pytest.mark.parametrize("out", [(3,), 3, [jnp.float32], "float32", None])
def test_results_are_described_by_shape_and_dtype(out):
    with pytest.raises(InvalidInputError, match=r"out must be a jax\.ShapeDtypeStruct"):
        torch_call(torch.relu, out)

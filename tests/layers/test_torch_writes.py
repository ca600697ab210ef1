"""Rows that torch writes to a cache may be views of it: they are read as they were before."""

import pytest
import torch

from pagedattn import KVCache
from pagedattn_torch import write_kv_

PLANES = {
    "two tensors": lambda kv: KVCache(kv[:, 0].contiguous(), kv[:, 1].contiguous()),
    "one tensor, blocks first": lambda kv: KVCache(kv[:, 0], kv[:, 1]),
    "one tensor, planes first": lambda kv: KVCache(*kv.transpose(0, 1).contiguous()),
}


@pytest.mark.parametrize("own_values", [False, True])
@pytest.mark.parametrize("name", PLANES)
def test_rows_of_the_cache_move(name, own_values):
    cache = PLANES[name](torch.randn(8, 2, 4, 2, 16, generator=torch.Generator().manual_seed(0)))
    key, value = cache.key[2], cache.value[2]  # of slots 8 to 11, one slot further
    value = value if own_values else torch.ones_like(value)
    expected, slots = (key.clone(), value.clone()), torch.arange(9, 13)
    write_kv_(cache, key, value, slots)
    for plane, rows in zip(cache.planes, expected, strict=True):
        assert torch.equal(plane[slots // 4, slots % 4], rows)

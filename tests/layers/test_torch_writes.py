"""Rows that torch writes to a cache may be views of it: they are read as they were before."""

import pytest
import torch

from pagedattn import KVCache
from pagedattn_torch import TorchSDPABackendImpl, TorchSDPAMetadata, write_kv_

PLANES = {
    "two tensors": lambda kv: KVCache(kv[:, 0].contiguous(), kv[:, 1].contiguous()),
    "one tensor, blocks first": lambda kv: KVCache(kv[:, 0], kv[:, 1]),
    "one tensor, planes first": lambda kv: KVCache(*kv.transpose(0, 1).contiguous()),
}


# Who has views of memory: torch knows of the first alone that they share a storage.
VIEWS = {
    "torch": lambda rows: rows,
    "DLPack": torch.from_dlpack,
    "NumPy": lambda rows: torch.from_numpy(rows.numpy()),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("source", ["key", "value", "ones"])
@pytest.mark.parametrize("name", PLANES)
def test_rows_of_the_cache_move(name, source, shift, view):
    """To slots beside them; the values too, or from where the keys are."""
    cache = PLANES[name](torch.randn(8, 2, 4, 2, 16, generator=torch.Generator().manual_seed(0)))
    key = VIEWS[view](cache.key[2])
    value = torch.ones_like(key) if source == "ones" else VIEWS[view](getattr(cache, source)[2])
    expected, slots = (key.clone(), value.clone()), torch.arange(8, 12) + shift
    write_kv_(cache, key, value, slots)
    for plane, rows in zip(cache.planes, expected, strict=True):
        assert torch.equal(plane[slots // 4, slots % 4], rows)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("source", ["key", "value"])
@pytest.mark.parametrize("context", [0, 2])
def test_a_layer_attends_to_rows_of_its_cache(context, source, view):
    """As to copies of them, that is as they were before they were written elsewhere."""
    kv_cache = torch.randn(2, 8, 4, 2, 16, generator=torch.Generator().manual_seed(0))
    query, layer = torch.randn(3, 4, 16), TorchSDPABackendImpl(4, 16, num_kv_heads=2)
    results = []
    for take in (VIEWS[view], torch.clone):
        held = kv_cache.clone()
        rows = [take(held[plane].flatten(0, 1)[4:7]) for plane in (0, int(source == "value"))]
        meta = TorchSDPAMetadata.from_lists([3], [context], [[1, 2]], block_size=4)
        results.append((layer.forward(query, *rows, held, meta), held))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)

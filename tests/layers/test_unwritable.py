"""Caches of which torch can write some planes and not others: an error before the first write."""

import pytest
import torch

from pagedattn import KVCache, PagedAttentionError
from pagedattn_torch import (
    TorchSDPABackend,
    TorchSDPABackendImpl,
    TorchSDPAMetadata,
    copy_blocks_,
    swap_blocks_,
    write_kv_,
)


@torch.inference_mode()
def of_inference(plane):
    return plane.clone()


UNWRITABLE = {
    "an inference tensor": of_inference,
    "one row for all": lambda plane: plane[:1].expand(plane.shape),
    "on meta": lambda plane: plane.to("meta"),
    "functional": torch._to_functional_tensor,
    "freed": lambda plane: freed(plane.clone()),
}
IDS = torch.tensor([0]), torch.tensor([1])


def freed(plane):
    plane.untyped_storage().resize_(0)
    return plane


def planes(spoiled, kind):
    made = {name: torch.zeros(4, 4, 2, 8) for name in ("key", "value")}
    made[spoiled] = UNWRITABLE[kind](made[spoiled])
    return KVCache(**made)


def good():
    return KVCache(torch.ones(4, 4, 2, 8), torch.ones(4, 4, 2, 8))


def forward(cache):
    meta = TorchSDPAMetadata.from_lists([3], [0], [[1]], block_size=4)
    x = torch.ones(3, 16)
    TorchSDPABackendImpl(num_heads=2, head_size=8).forward(x, x, x, cache, meta)


def forward_prepared(cache):
    meta = TorchSDPAMetadata.from_lists([3], [0], [[1]], block_size=4)
    x, layer = torch.ones(3, 16), TorchSDPABackendImpl(num_heads=2, head_size=8)
    layer.prepare(x, x, x, good(), meta)
    layer.forward(x, x, x, cache, meta)


WRITES = {
    "write_kv_": lambda cache: write_kv_(cache, *torch.ones(2, 3, 2, 8), torch.arange(3)),
    "copy_blocks_": lambda cache: copy_blocks_(cache, *IDS),
    "swap_blocks_": lambda cache: swap_blocks_(good(), cache, *IDS),
    "copy_blocks": lambda cache: TorchSDPABackend.copy_blocks([good(), cache], {0: 1}),
    "forward": forward,
    "forward of a prepared step": forward_prepared,
}


@pytest.mark.parametrize("kind", UNWRITABLE)
@pytest.mark.parametrize("spoiled", ["key", "value"])
@pytest.mark.parametrize("name", WRITES)
def test_all_planes_are_checked_before_the_first_is_written(name, spoiled, kind):
    cache = planes(spoiled, kind)
    with pytest.raises(PagedAttentionError):
        WRITES[name](cache)
    other = cache.value if spoiled == "key" else cache.key
    assert not other.any()


@pytest.mark.parametrize("name", WRITES)
def test_inference_tensors_are_written_in_inference_mode(name):
    with torch.inference_mode():
        cache = KVCache(*(plane.clone() for plane in good().planes))
        WRITES[name](cache)


def test_an_output_is_checked_before_the_cache_is_written():
    meta = TorchSDPAMetadata.from_lists([3], [0], [[1]], block_size=4)
    x, cache = torch.ones(3, 16), KVCache(torch.zeros(4, 4, 2, 8), torch.zeros(4, 4, 2, 8))
    layer = TorchSDPABackendImpl(num_heads=2, head_size=8)
    with pytest.raises(PagedAttentionError, match="output is an inference tensor"):
        layer.forward(x, x, x, cache, meta, output=of_inference(x))
    assert not cache.key.any()

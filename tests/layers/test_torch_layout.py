"""The cache's layout: views of a layer's tensor, and the packed form as a bijection."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_layers import normal

from pagedattn import InvalidInputError, KVCache
from pagedattn_torch import (
    AttentionBackend,
    IpexAttnBackend,
    TorchSDPABackend,
    XFormersBackend,
    empty_kv_cache,
    kv_cache_shape,
    pack_keys,
    pack_values,
    split_kv_cache,
    unpack_keys,
    unpack_values,
)

DTYPES = {torch.float32: 4, torch.bfloat16: 8, torch.float16: 8, torch.float8_e4m3fn: 16}
SIZES = st.integers(1, 5)


@pytest.mark.parametrize("flat", [False, True])
def test_split_gives_views(flat):
    kv_cache = torch.zeros(kv_cache_shape(5, 4, 2, 8))
    cache = split_kv_cache(kv_cache.view(2, 5, -1) if flat else kv_cache, 2, 8)
    assert cache.key.shape == cache.value.shape == (5, 4, 2, 8)
    cache.key[3, 1, 0, 7], cache.value[4, 2, 1, 0] = 1.0, 2.0
    assert (kv_cache[0, 3, 1, 0, 7], kv_cache[1, 4, 2, 1, 0]) == (1.0, 2.0)
    assert cache.key.data_ptr() == kv_cache.data_ptr()


def test_split_keeps_a_strided_cache_and_a_pair():
    layers = torch.zeros(2, 3, 5, 4, 2, 8)  # [2, layers, ...]: one layer is strided
    cache = split_kv_cache(layers[:, 1], 2, 8)
    cache.value.fill_(3.0)
    assert layers[1, 1].eq(3.0).all()
    assert layers.sum() == 3.0 * cache.value.numel()
    assert split_kv_cache(cache, 2, 8) is cache


@pytest.mark.parametrize(
    "shape", [(2, 5, 4, 4, 8), (2, 5, 4, 2, 16), (3, 5, 4, 2, 8), (2, 5, 65), (2, 5), (5, 4, 2, 8)]
)
def test_split_refuses_other_shapes(shape):
    with pytest.raises(InvalidInputError, match=r"kv_cache must be \[2, num_blocks"):
        split_kv_cache(torch.zeros(shape), 2, 8)


def test_split_refuses_a_flat_cache_with_gaps_and_a_pair_of_others():
    with pytest.raises(InvalidInputError, match="contiguous"):
        split_kv_cache(torch.zeros(2, 5, 128)[:, :, :64], 2, 8)
    plane = torch.zeros(5, 4, 4, 8)
    with pytest.raises(InvalidInputError, match="kv_cache"):
        split_kv_cache(KVCache(plane, plane), 2, 8)


@given(order=st.permutations(range(5)), dtype=st.sampled_from([*DTYPES]))
def test_a_cache_of_any_order(order, dtype):
    """The shape stays; in memory the axes lie as told, without gaps."""
    shape = kv_cache_shape(5, 4, 3, 8)
    held = empty_kv_cache(shape, order, dtype=dtype)
    assert (held.shape, held.dtype) == (shape, dtype)
    assert held.permute(*order).is_contiguous()
    cache = split_kv_cache(held, 3, 8)
    assert cache.key.data_ptr() == held.data_ptr()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1, 2, 3, 3), (1, 2, 3, 4, 5), (), (0,) * 6])
def test_an_order_holds_each_axis_once(order):
    with pytest.raises(InvalidInputError, match="stride_order"):
        empty_kv_cache(kv_cache_shape(5, 4, 3, 8), order)


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
@pytest.mark.parametrize(
    "backend", [AttentionBackend, IpexAttnBackend, TorchSDPABackend, XFormersBackend]
)
def test_backends_ask_for_an_order(backend, device):
    order = backend.get_kv_cache_stride_order(device)
    assert empty_kv_cache(backend.get_kv_cache_shape(5, 4, 3, 8), order).shape == (2, 5, 4, 3, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@given(num_blocks=SIZES, block_size=SIZES, heads=SIZES, groups=st.integers(1, 3), seed=SIZES)
def test_packing_is_a_bijection(dtype, num_blocks, block_size, heads, groups, seed):
    x = DTYPES[dtype]
    plane = normal(seed, num_blocks, block_size, heads, groups * x).to(dtype)
    bits = torch.uint8
    for pack, unpack in ((pack_keys, unpack_keys), (pack_values, unpack_values)):
        packed = pack(plane)
        assert packed.is_contiguous()
        assert unpack(packed).shape == plane.shape
        assert torch.equal(unpack(packed).view(bits), plane.view(bits))
        assert torch.equal(pack(unpack(packed)).view(bits), packed.view(bits))


@given(data=st.data())
def test_where_an_element_lies(data):
    shape = (3, 4, 2, 24)
    plane = torch.arange(np.prod(shape)).reshape(shape).to(torch.float32)
    at = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    block, token, head, d = at
    x = 4
    assert pack_keys(plane)[block, head, d // x, token, d % x] == plane[at]
    assert pack_values(plane)[block, head, d, token] == plane[at]


@pytest.mark.parametrize(("dtype", "head_size"), [(torch.float16, 12), (torch.float32, 6)])
def test_packing_needs_whole_groups(dtype, head_size):
    with pytest.raises(InvalidInputError, match="multiple of"):
        pack_keys(torch.zeros(2, 4, 1, head_size, dtype=dtype))

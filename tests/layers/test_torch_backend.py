"""The backend classes: their names, cache shapes and copies of blocks."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_layers import normal, step_of

from pagedattn import (
    AttentionSpec,
    BackendUnavailableError,
    InvalidInputError,
    KVCache,
    UnsupportedError,
)
from pagedattn.testing import random_problem, reference_write
from pagedattn_torch import (
    AttentionBackend,
    IpexAttnBackend,
    IpexAttnBackendImpl,
    IpexAttnMetadata,
    TorchSDPABackend,
    TorchSDPABackendImpl,
    TorchSDPAMetadata,
    XFormersBackend,
    XFormersImpl,
    XFormersMetadata,
    explain,
    split_kv_cache,
    write_kv_,
)

CLASSES = {
    XFormersBackend: ("XFORMERS", XFormersImpl, XFormersMetadata),
    TorchSDPABackend: ("TORCH_SDPA", TorchSDPABackendImpl, TorchSDPAMetadata),
    IpexAttnBackend: ("IPEX", IpexAttnBackendImpl, IpexAttnMetadata),
}


@pytest.mark.parametrize("backend", CLASSES)
def test_names(backend):
    name, impl, metadata = CLASSES[backend]
    assert issubclass(backend, AttentionBackend)
    assert backend.get_name() == backend().get_name() == name
    assert backend.get_impl_cls() is impl
    assert backend.get_metadata_cls() is metadata
    assert backend.get_kv_cache_shape(8, 16, 2, 64) == (2, 8, 16, 2, 64)


@pytest.mark.parametrize("backend", CLASSES)
def test_what_works_on_any_machine(backend):
    """Classes construct and metadata splits, whether or not the kernels can run here."""
    layer = backend.get_impl_cls()(8, 64, 0.125, 2, [0.5] * 8, 128, "auto")
    assert (layer.num_heads, layer.head_size, layer.num_kv_heads) == (8, 64, 2)
    meta = backend.make_metadata(
        num_prefills=1,
        num_prefill_tokens=2,
        num_decode_tokens=1,
        slot_mapping=torch.arange(3),
        seq_lens=[2, 1],
    )
    assert type(meta) is type(meta.prefill_metadata) is type(meta.decode_metadata)
    assert type(meta) is backend.get_metadata_cls()


@pytest.mark.parametrize("impl", [XFormersImpl, IpexAttnBackendImpl])
def test_kernels_that_cannot_run_say_why(impl):
    problem = random_problem([3, 1], [3, 5], AttentionSpec())
    step = step_of(problem)
    before = step.kv_cache.clone()
    cache = split_kv_cache(step.kv_cache, 2, 16)
    reasons = explain(step.query, cache, step.attn_metadata.to_batch(4))[impl.backend]
    if not reasons:
        pytest.skip(f"{impl.backend} can run here")
    with pytest.raises((UnsupportedError, BackendUnavailableError)) as error:
        impl(4, 16, num_kv_heads=2).forward(*step)
    for reason in reasons:
        assert reason in str(error.value)
    assert torch.equal(step.kv_cache.nan_to_num(7), before.nan_to_num(7))


@pytest.mark.usefixtures("on_cpu")
def test_cuda_is_asked_for():
    problem = random_problem([1], [5], AttentionSpec())
    step = step_of(problem)
    cache = split_kv_cache(step.kv_cache, 2, 16)
    reasons = explain(step.query, cache, step.attn_metadata.to_batch(4))
    assert any("runs on cuda" in reason for reason in reasons["xformers"])
    assert reasons["sdpa"] == []


def layers(count, num_blocks, block_size, head_size, dtype, flat=False):
    shape = AttentionBackend.get_kv_cache_shape(num_blocks, block_size, 8, head_size)
    caches = [normal(i, *shape, dtype=dtype) for i in range(count)]
    return [cache.flatten(2) for cache in caches] if flat else caches


@pytest.mark.parametrize("head_size", [64, 80, 256])
@pytest.mark.parametrize("block_size", [8, 32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_copy_blocks(head_size, block_size, dtype):
    """Each source to two destinations, in every layer and both planes; exact."""
    caches = layers(2, 40, block_size, head_size, dtype, flat=head_size == 80)
    before = [cache.clone() for cache in caches]
    ids = np.random.default_rng(0).permutation(40)[:36].reshape(12, 3)
    mapping = {int(src): [int(a), int(b)] for src, a, b in ids}
    TorchSDPABackend.copy_blocks(caches, mapping)
    for cache, old in zip(caches, before, strict=True):
        for src, dsts in mapping.items():
            for dst in dsts:
                old[:, dst] = old[:, src]
        assert torch.equal(cache, old)


@pytest.mark.parametrize("flat", [False, True])
@given(data=st.data())
def test_copy_blocks_reads_before_it_writes(flat, data):
    """A pair table of any kind, sources and destinations overlapping."""
    (cache,) = layers(1, 9, 2, 4, torch.float32, flat)
    dst = data.draw(st.lists(st.integers(0, 8), unique=True, max_size=9))
    src = data.draw(st.lists(st.integers(0, 8), min_size=len(dst), max_size=len(dst)))
    want = cache.clone()
    want[:, dst] = cache[:, src]
    pairs = list(zip(src, dst, strict=True))
    table = data.draw(st.sampled_from([pairs, torch.tensor(pairs).reshape(-1, 2)]), label="mapping")
    TorchSDPABackend.copy_blocks([cache], table)
    assert torch.equal(cache, want)


@pytest.mark.parametrize("form", ["dict", "int64", "int32", "pairs"])
def test_swap_blocks_copies(form):
    """Into another cache, of another number of blocks; the source stays."""
    (src,), (dst,) = layers(1, 12, 8, 64, torch.bfloat16), layers(1, 30, 8, 64, torch.bfloat16)
    before, want = src.clone(), dst.clone()
    mapping = {0: 29, 11: 3, 5: 0}
    for a, b in mapping.items():
        want[:, b] = src[:, a]
    table = torch.tensor(list(mapping.items()), dtype=getattr(torch, form, torch.int64))
    forms = {"dict": mapping, "pairs": list(mapping.items())}
    TorchSDPABackend.swap_blocks(src, dst, forms.get(form, table))
    assert torch.equal(dst, want)
    assert torch.equal(src, before)


def test_copies_between_pairs_and_nothing_to_copy():
    (cache,) = layers(1, 4, 2, 4, torch.float32)
    before = cache.clone()
    for nothing in ({}, [], torch.zeros(0, 2, dtype=torch.int64)):
        TorchSDPABackend.copy_blocks([cache], nothing)
        TorchSDPABackend.swap_blocks(cache, cache, nothing)
    assert torch.equal(cache, before)
    TorchSDPABackend.copy_blocks([KVCache(*cache.unbind(0))], {1: [2]})
    assert torch.equal(cache[:, 2], before[:, 1])


BAD = {
    "out of range": ({0: [4]}, "dst"),
    "negative": ({-2: [1]}, "src"),
    "twice": ({0: [2], 1: [2]}, "twice"),
    "not pairs": (torch.zeros(3, dtype=torch.int64), "pairs"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_copies_touch_no_layer(name):
    mapping, word = BAD[name]
    caches = layers(2, 4, 2, 4, torch.float32)
    before = [cache.clone() for cache in caches]
    with pytest.raises(InvalidInputError, match=word):
        TorchSDPABackend.copy_blocks(caches, mapping)
    assert all(torch.equal(*pair) for pair in zip(caches, before, strict=True))


def test_a_smaller_layer_stops_the_copy_before_the_first():
    caches = layers(1, 8, 2, 4, torch.float32) + layers(1, 4, 2, 4, torch.float32)
    before = caches[0].clone()
    with pytest.raises(InvalidInputError, match="dst"):
        TorchSDPABackend.copy_blocks(caches, {0: [5]})
    assert torch.equal(caches[0], before)


@pytest.mark.parametrize("head_size", [64, 80, 112, 256])
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tokens_at_random_slots(head_size, block_size, dtype):
    """42 tokens of 8 heads at slots drawn without replacement, into a layer's cache; exact."""
    (kv_cache,) = layers(1, 33, block_size, head_size, dtype)
    slots = np.random.default_rng(0).permutation(33 * block_size)[:42]
    key, value = normal(7, 2, 42, 8, head_size, dtype=dtype)
    planes = [plane.float().numpy() for plane in kv_cache]
    want = reference_write(*planes, key.float().numpy(), value.float().numpy(), slots)
    write_kv_(split_kv_cache(kv_cache, 8, head_size), key, value, torch.from_numpy(slots))
    for plane, expected in zip(kv_cache, want, strict=True):
        np.testing.assert_array_equal(plane.float().numpy(), expected)


NO_PAIRS = {
    "a fraction": [[0, 0.5]],
    "a fraction in a dict": {0: 1.7},
    "a fraction among several": {0: [1, 2.5]},
    "a tensor of fractions": torch.tensor([[0.0, 1.0]]),
    "text": "ab",
    "rows of text": {0: "12"},
    "unequal rows": [[0, 1], [2]],
    "nothing": None,
    "no destination": {0: None},
    "three columns": [[0, 1, 2]],
}


@pytest.mark.parametrize("name", NO_PAIRS)
def test_what_is_no_pairs_of_blocks_is_refused(name):
    (cache,) = layers(1, 4, 2, 4, torch.float32)
    before = cache.clone()
    with pytest.raises(InvalidInputError, match="block pairs must be"):
        TorchSDPABackend.copy_blocks([cache], NO_PAIRS[name])
    with pytest.raises(InvalidInputError, match="block pairs must be"):
        TorchSDPABackend.swap_blocks(cache, cache, NO_PAIRS[name])
    assert torch.equal(cache, before)


@pytest.mark.parametrize(
    "pairs",
    [
        np.array([[0, 1], [0, 2]]),
        torch.tensor([[0, 1], [0, 2]], dtype=torch.uint8),
        {0: torch.tensor([1, 2])},
        {torch.tensor(0): np.array([1, 2])},
        {np.int64(0): (1, np.int32(2))},
    ],
)
def test_pairs_of_any_integers(pairs):
    (cache,) = layers(1, 4, 2, 4, torch.float32)
    before = cache.clone()
    TorchSDPABackend.copy_blocks([cache], pairs)
    assert torch.equal(cache, before[:, [0, 0, 0, 3]])


@pytest.mark.parametrize("shape", [(-1, 0, 2, 16), (8, 16, 2.0, 64), (1 << 20, 1 << 12, 1, 1)])
def test_no_shape_for_a_cache(shape):
    with pytest.raises(InvalidInputError, match="num_blocks"):
        TorchSDPABackend.get_kv_cache_shape(*shape)


@pytest.mark.parametrize("cache", [np.zeros((2, 3, 2, 1, 4)), [1], KVCache(np.zeros(1), 0)])
def test_copies_want_tensors(cache):
    with pytest.raises(InvalidInputError, match="must be a torch tensor"):
        TorchSDPABackend.copy_blocks([cache], {0: 1})

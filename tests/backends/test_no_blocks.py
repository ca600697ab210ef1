"""Caches of no blocks: what no sequence has a key in may be empty."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import may_refuse

from pagedattn import (
    InvalidInputError,
    copy_blocks,
    fill_blocks,
    init_kv_cache,
    init_latent_cache,
    make_batch,
    paged_attention,
    swap_blocks,
    write_kv,
)
from pagedattn._dispatch.registry import Framework, names

CACHES = {
    "float32": lambda blocks: init_kv_cache(blocks, 4, 1, 8, jnp.float32),
    "bfloat16": lambda blocks: init_kv_cache(blocks, 4, 1, 8),
    "int8": lambda blocks: init_kv_cache(blocks, 4, 1, 8, "int8", key_scale=0.5, value_scale=0.5),
    "latent": lambda blocks: init_latent_cache(blocks, 4, 8, 4, jnp.float32),
}


@pytest.fixture(params=CACHES)
def make(request):
    return CACHES[request.param]


def a_call(make, blocks):
    cache = make(blocks)
    dtype = cache.dtype if cache.key_scale is None else jnp.float32
    batch = make_batch([1, 2], None, [[], []], key_lens=[0, 0], block_size=4, pad_blocks=2)
    return jnp.ones((3, 2, 8), dtype), cache, batch


def skip_what_is_refused(backend, cache, sinks=None):
    asked = {"sinks": sinks is not None, "cache_dtype": cache.key_scale is not None}
    asked["value_dim"] = cache.value is None
    for option, is_asked in asked.items():
        if is_asked and may_refuse(backend, option):
            pytest.skip(f"{backend} refuses {option}")


@pytest.mark.parametrize("sinks", [None, np.float32([0.5, -1])])
def test_attention_to_no_keys(backend, mode, make, sinks):
    """As over a cache that has blocks, in every bit: queries that see no key."""
    skip_what_is_refused(backend, make(1), sinks)
    options = {"backend": backend, "sinks": sinks, "return_lse": backend != "ipex"}

    def attend(query, cache, batch):
        return paged_attention(query, cache, batch, **options)

    attend = jax.jit(attend) if mode == "jit" else attend
    got, want = attend(*a_call(make, 0)), attend(*a_call(make, 3))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_attention_of_tensors(backend, make):
    if backend not in names(Framework.TORCH):
        pytest.skip(f"{backend} takes no tensors")
    skip_what_is_refused(backend, make(1))
    tensors = pytest.importorskip("tensors").tensors
    query, cache, batch = a_call(make, 0)
    query, cache = tensors((query, cache))
    attend = pytest.importorskip("pagedattn_torch").paged_attention
    out = attend(query, cache, batch, backend=backend)
    assert out.shape == (3, 2, cache.value_dim or 8)
    assert not out.any()


def test_a_sequence_with_keys_is_refused(backend, make):
    query, cache, _ = a_call(make, 0)
    batch = make_batch([3], [0], [[0]], block_size=4)
    with pytest.raises(InvalidInputError, match="must name blocks"):
        paged_attention(query, cache, batch, backend=backend)


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
def test_writes_and_copies_of_nothing(make, wrap):
    query, cache, _ = a_call(make, 0)
    some, row, ids = make(2), query[:2, :1], jnp.array([-1, -1])
    value = None if cache.value is None else row
    for written in (
        wrap(write_kv)(cache, row, value, ids),
        wrap(copy_blocks)(cache, ids, ids),
        wrap(fill_blocks)(cache, ids),
        wrap(swap_blocks)(some, cache, ids, ids),
    ):
        assert jax.tree.map(jnp.shape, written) == jax.tree.map(jnp.shape, cache)
    swapped = wrap(swap_blocks)(cache, some, ids, ids)
    jax.tree.map(np.testing.assert_array_equal, swapped, some)


def test_writes_and_copies_of_no_tensors(make):
    tensors = pytest.importorskip("tensors").tensors
    torch_side = pytest.importorskip("pagedattn_torch")
    query, cache, _ = a_call(make, 0)
    cache, some, row = tensors((cache, make(2), query[:2, :1]))
    ids = tensors(jnp.array([-1, -1]))
    value = None if cache.value is None else row
    assert torch_side.write_kv_(cache, row, value, ids) is cache
    assert torch_side.swap_blocks_(some, cache, ids, ids) is cache
    assert torch_side.swap_blocks_(cache, some, ids, ids) is some
    assert not some.key.float().any()

"""The Flax and Equinox layers: equal to float64, in two programs, with no second cache."""

import doctest
import importlib

import jax
import jax.numpy as jnp
import pytest
from layers import judge, stacked
from layers.sizes import NUM_BLOCKS, NUM_LAYERS, SPECS
from layers.stacked import batch_of_layer

from pagedattn import KVCache, init_kv_cache, make_batch, paged_attention, write_kv

pytestmark = pytest.mark.usefixtures("exact_products")


@pytest.fixture(params=["flax", "equinox"])
def example(request):
    """A program of examples/ anew, so that it has traced nothing yet."""
    pytest.importorskip(request.param)
    return importlib.reload(importlib.import_module(f"{request.param}_layers"))


def test_layers_equal_float64_in_two_programs(example, monkeypatch, capsys):
    lengths = []

    def counting(model, cache, pool, x, *rest):
        lengths.append(len(x))
        return advance(model, cache, pool, x, *rest)

    advance = example.advance
    monkeypatch.setattr(example, "advance", counting)
    assert example.main() == 0
    assert "in place: True" in capsys.readouterr().out
    assert sorted(lengths) == [4, 16]
    monkeypatch.setattr(judge, "SPECS", SPECS[::-1])
    assert example.main() == 1


def test_the_example_in_a_docstring_runs():
    assert doctest.testmod(stacked) == (0, 3)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("carried", [True, False])
def test_a_scan_holds_one_cache_only_if_it_carries_it(carried):
    """Why the layers share a cache: one that a scan reads and returns is held twice."""
    cache = init_kv_cache(NUM_LAYERS * NUM_BLOCKS, 16, 2, 64)
    if not carried:
        cache = jax.tree.map(lambda x: x.reshape(NUM_LAYERS, -1, *x.shape[1:]), cache)
    batch = make_batch([1], [3], [[0]], block_size=16)
    scan = carried_scan if carried else scan_of_caches
    compiled = jax.jit(scan, donate_argnums=1).lower(jnp.ones((1, 2, 64)), cache, batch).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert (temporary < cache.key.nbytes) == carried


def layer(x, cache: KVCache, batch):
    x = x.astype(cache.dtype)
    cache = write_kv(cache, x, x, batch.slot_mapping)
    return paged_attention(x, cache, batch, backend="xla").astype(jnp.float32), cache


def carried_scan(x, cache, batch):
    def step(carry, index):
        return layer(*carry, batch_of_layer(batch, index, NUM_BLOCKS)), None

    return jax.lax.scan(step, (x, cache), jnp.arange(NUM_LAYERS))[0]


def scan_of_caches(x, caches, batch):
    return jax.lax.scan(lambda x, cache: layer(x, cache, batch), x, caches)

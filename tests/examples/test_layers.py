"""The Flax and Equinox layers: equal to float64, in two programs, with no second cache."""

import doctest
import importlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from layers import judge, stacked
from layers.sizes import NUM_BLOCKS, NUM_LAYERS, SPECS
from layers.stacked import batch_of_layer, ids_of_layer

from pagedattn import (
    AttentionSpec,
    KVCache,
    copy_blocks,
    fork,
    init_block_pool,
    init_kv_cache,
    make_batch,
    next_batch,
    paged_attention,
    release_behind,
    write_kv,
)

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


def test_layers_in_one_cache_equal_caches_of_their_own():
    """With sequences that fork, and blocks behind a window given back."""
    num_blocks, spec = 12, AttentionSpec(sliding_window=5)
    rows = jax.random.normal(jax.random.key(0), (6, 3, 8, 2, 16))  # steps, layers, tokens
    sizes = {"num_tokens": 8, "max_query_len": 8}

    def own(cache, batch, growth, x):
        cache = copy_blocks(cache, growth.copy_src, growth.copy_dst)
        cache = write_kv(cache, x, x, batch.slot_mapping)
        return cache, paged_attention(x, cache, batch, spec, backend="xla")

    @jax.jit
    def in_one(cache, batch, growth, xs):
        def through(cache, layer):
            copies = (
                ids_of_layer(x, layer, num_blocks) for x in (growth.copy_src, growth.copy_dst)
            )
            here = replace(growth, **dict(zip(("copy_src", "copy_dst"), copies, strict=True)))
            return own(cache, batch_of_layer(batch, layer, num_blocks), here, xs[layer])

        return jax.lax.scan(through, cache, jnp.arange(len(xs)))

    pool = init_block_pool(num_blocks, 4, max_seqs=2, max_blocks=8)
    caches = [init_kv_cache(num_blocks, 4, 2, 16, jnp.float32)] * 3
    shared = init_kv_cache(3 * num_blocks, 4, 2, 16, jnp.float32)
    copied = freed = 0
    for step, xs in enumerate(rows):
        if step == 1:
            pool, _ = fork(pool, jnp.array([0]), jnp.array([1]))
        new = jnp.array([6, 0] if step == 0 else [2, 3])
        pool, batch, growth = next_batch(pool, new, **sizes)
        each = [own(cache, batch, growth, x) for cache, x in zip(caches, xs, strict=True)]
        caches, want = zip(*each, strict=True)
        shared, outs = in_one(shared, batch, growth, xs)
        assert jnp.array_equal(outs, jnp.stack(want))
        pool, gone = release_behind(pool, 5, max_new_tokens=8)
        copied, freed = copied + (growth.copy_src >= 0).sum(), freed + (gone >= 0).sum()
    assert min(copied, freed) > 0
    assert growth.ok.all()
    planes = [jnp.concatenate(planes) for planes in zip(*(c.planes for c in caches), strict=True)]
    assert all(map(jnp.array_equal, shared.planes, planes))


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

"""Caches whose values are not a plane like the keys: made, written, copied and kept in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import assert_same, assert_words
from pagedattn_interop import to_jax, to_torch

from pagedattn import (
    AttentionSpec,
    InvalidInputError,
    KVCache,
    append_tokens,
    copy_blocks,
    fill_blocks,
    fork,
    init_block_pool,
    init_kv_cache,
    init_latent_cache,
    make_batch,
    next_batch,
    paged_attention,
    swap_blocks,
    write_kv,
)
from pagedattn.testing import reference_attention, reference_write
from pagedattn_torch import copy_blocks_, swap_blocks_, write_kv_

FORMS = ("latent", "narrow", "wide")


def cache_of(form, num_blocks=5, dtype=jnp.float32, seed=0):
    """Blocks of 4 tokens, one KV head of 6 columns, of random values."""
    key, *values = jax.random.split(jax.random.key(seed))
    key = jax.random.normal(key, (num_blocks, 4, 1, 6)).astype(dtype)
    if form == "latent":
        return KVCache(key, None, value_dim=4)
    width = 4 if form == "narrow" else 9
    return KVCache(key, jax.random.normal(values[0], (num_blocks, 4, 1, width)).astype(dtype))


def new_rows(cache, num_tokens=3):
    """New keys and values for a cache; None for those that it does not hold."""
    keys = jax.random.split(jax.random.key(9))
    made = [
        jax.random.normal(key, (num_tokens, *plane.shape[2:])).astype(cache.dtype)
        for key, plane in zip(keys, cache.planes, strict=False)
    ]
    return made if len(made) == 2 else [*made, None]


def numpy_of(cache):
    return [np.array(plane) for plane in cache.planes]


def test_init():
    cache = init_kv_cache(3, 4, 2, 8, value_dim=5)
    assert (cache.key.shape, cache.value.shape) == ((3, 4, 2, 8), (3, 4, 2, 5))
    assert cache.value_dim is None
    cache = init_latent_cache(3, 4, 8, 5, jnp.int8, num_kv_heads=2, key_scale=0.5)
    assert (cache.key.shape, cache.value, cache.value_dim) == ((3, 4, 2, 8), None, 5)
    assert (cache.dtype, cache.key_scale, cache.value_scale) == (jnp.int8, 0.5, None)
    assert cache.planes == (cache.key,)


def test_it_is_a_pytree_of_one_array():
    cache = cache_of("latent")
    leaves, structure = jax.tree.flatten(cache)
    assert len(leaves) == 1
    assert jax.tree.unflatten(structure, leaves).value_dim == 4
    assert_same(to_jax(to_torch(cache)), cache)
    assert jax.tree.structure(cache) != jax.tree.structure(KVCache(cache.key, None, value_dim=5))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", ["eager", "jit", "torch"])
def test_writes_copies_swaps_and_fills(form, way):
    """Each plane as if it were a cache's key."""
    cache, other = cache_of(form), cache_of(form, num_blocks=3, seed=1)
    rows, slots = new_rows(cache), jnp.array([6, -1, 0])
    src, dst = jnp.array([0, 1, -1]), jnp.array([2, 0, 1])
    if way == "torch":
        held, there = to_torch((cache, other), copy=True)
        held = write_kv_(held, *to_torch(rows, copy=True), slots)
        moved = swap_blocks_(held, there, src, dst)
        copied = copy_blocks_(to_torch(cache, copy=True), src, dst)
        got = [to_jax(x, copy=True) for x in (held, moved, copied)]
    else:
        wrap = jax.jit if way == "jit" else lambda f: f
        written = wrap(write_kv)(cache, *rows, slots)
        moved, copied = (
            wrap(swap_blocks)(written, other, src, dst),
            wrap(copy_blocks)(cache, src, dst),
        )
        got = [written, moved, copied]
        filled = wrap(fill_blocks)(cache, jnp.array([1, -1]))
        for plane, before in zip(filled.planes, numpy_of(cache), strict=True):
            before[1] = 0
            np.testing.assert_array_equal(plane, before)
    for plane, new in enumerate(rows[: len(cache.planes)]):
        before, there = numpy_of(cache)[plane], numpy_of(other)[plane]
        new = np.asarray(new)
        written, _ = reference_write(before, before, new, new, [6, -1, 0])
        there[[2, 0]], copied = written[[0, 1]], before.copy()
        copied[[2, 0]] = before[[0, 1]]
        for cache_got, want in zip(got, (written, there, copied), strict=True):
            np.testing.assert_array_equal(cache_got.planes[plane], want)
    assert all(jax.tree.structure(x) == jax.tree.structure(cache) for x in got)


def test_a_quantised_latent_cache_has_one_scale():
    """It is written and read with that of its keys: by the oracle, fed what is held."""
    cache = init_latent_cache(2, 4, 6, 4, jnp.int8, key_scale=0.05)
    batch = make_batch([3], [0], [[1]], block_size=4)
    key = jax.random.normal(jax.random.key(0), (3, 1, 6))
    query = jax.random.normal(jax.random.key(1), (3, 2, 6))
    cache = write_kv(cache, key, None, batch.slot_mapping)
    held = np.asarray(cache.key) * np.float32(0.05)
    np.testing.assert_allclose(held[1, :3], key, atol=0.03)
    spec = AttentionSpec()
    want = reference_attention(np.asarray(query), held, held[..., :4], [[1]], [3], [0, 3], spec)[0]
    for backend in ("xla", "sdpa"):
        out = paged_attention(query, cache, batch, spec, backend=backend)
        np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("backend", ["xla", "sdpa"])
def test_decoding_from_a_pool_in_one_scan_keeps_the_cache_in_place(backend, dtype):
    """With a fork, so that a shared block is copied before it is written: equal to a loop."""

    def step(carry, inputs):
        pool, cache = carry
        query, latent = inputs
        new = jnp.array([1, 1, 0])
        pool, batch, growth = next_batch(pool, new, num_tokens=2, max_query_len=1)
        cache = copy_blocks(cache, growth.copy_src, growth.copy_dst)
        cache = write_kv(cache, latent, None, batch.slot_mapping)
        return (pool, cache), paged_attention(query, cache, batch, backend=backend)

    pool, _ = append_tokens(init_block_pool(9, 4, max_seqs=3, max_blocks=3), jnp.array([6, 0, 0]))
    pool, _ = fork(pool, jnp.array([0]), jnp.array([1]))
    queries = jax.random.normal(jax.random.key(2), (3, 2, 4, 6)).astype(dtype)
    latents = jax.random.normal(jax.random.key(3), (3, 2, 1, 6)).astype(dtype)
    fresh = functools.partial(cache_of, "latent", 9, dtype)
    carry, want = (pool, fresh()), []
    for inputs in zip(queries, latents, strict=True):
        carry, out = step(carry, inputs)
        want.append(out)

    @functools.partial(jax.jit, donate_argnums=1)
    def scanned(pool, cache):
        return jax.lax.scan(step, (pool, cache), (queries, latents))

    cache = fresh()
    before = cache.key.unsafe_buffer_pointer()
    (_, got), outs = scanned(pool, cache)
    assert got.key.unsafe_buffer_pointer() == before
    assert cache.key.is_deleted()
    np.testing.assert_array_equal(got.key, carry[1].key)
    error = 1e-5 if dtype == jnp.float32 else 2e-2
    outs, want = (np.asarray(x, np.float32) for x in (outs, jnp.stack(want)))
    np.testing.assert_allclose(outs, want, rtol=error, atol=error)


def test_attention_makes_no_copy_of_a_latent_cache():
    """Neither a plane of values nor a wider one: the program's memory does not grow with it."""
    sizes = []
    for blocks in (64, 512):
        cache = init_latent_cache(blocks, 16, 48, 32, jnp.float32)
        batch = make_batch([1], [40], [[3, 9, 1]], block_size=16)
        call = jax.jit(lambda *call: paged_attention(*call, backend="xla"))
        compiled = call.lower(jnp.zeros((1, 8, 48)), cache, batch).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert sizes[0] == sizes[1]


KEY, VALUE = np.zeros((3, 4, 2, 6), np.float32), np.zeros((3, 4, 2, 5), np.float32)
SCALE = np.float32(0.5)
BAD = {
    "no value_dim": ({"value": None}, ["without a value needs value_dim", "1 to head_dim = 6"]),
    "value_dim above head_dim": ({"value": None, "value_dim": 7}, ["value_dim", "= 6", "7"]),
    "no column": ({"value": None, "value_dim": 0}, ["value_dim", "got 0"]),
    "a truth value": ({"value": None, "value_dim": True}, ["value_dim", "got True"]),
    "an array": ({"value": None, "value_dim": np.array(3)}, ["value_dim", "Python integer"]),
    "value_dim of a plane": (
        {"value_dim": 4},
        ["last axis, 5", "leave it out", "4"],
    ),
    "other blocks": (
        {"value": VALUE[:2]},
        ["key and value", "[..., value_dim]", "[2, 4, 2, 5]"],
    ),
    "other heads": ({"value": VALUE[:, :, :1]}, ["key and value", "[3, 4, 1, 5]"]),
    "an empty plane": ({"value": VALUE[..., :0]}, ["value must have a column", "[3, 4, 2, 0]"]),
    "two scales": (
        {"key": KEY.astype(np.int8), "value": None, "value_scale": SCALE, "value_dim": 4},
        ["value_scale must be None in a latent cache", "key_scale"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_caches_that_do_not_fit_are_refused(name):
    changed, words = BAD[name]
    fields, none = {"key": KEY, "value": VALUE} | changed, np.zeros(0, np.int32)
    tensors = {
        name: torch.from_numpy(np.array(array))
        if "dim" not in name and array is not None
        else array
        for name, array in fields.items()
    }
    for call, given in ((copy_blocks, fields), (copy_blocks_, tensors)):
        with pytest.raises(InvalidInputError) as error:
            call(KVCache(**given), none, none)
        assert_words(error, words)


def test_value_dim_may_be_said_of_a_plane_that_has_it():
    cache = KVCache(jnp.asarray(KEY), jnp.asarray(VALUE), value_dim=5)
    assert_same(copy_blocks(cache, jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.int32)), cache)


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_do_not_fit_are_refused(form):
    cache = cache_of(form)
    key, value = new_rows(cache)
    slots = jnp.array([0, 1, 2])
    wrong = key if value is None else key[..., :3]
    text = "value must be None for a latent cache" if value is None else "num_kv_heads, value_dim"
    with pytest.raises(InvalidInputError, match=text):
        write_kv(cache, key, wrong, slots)
    with pytest.raises(InvalidInputError, match=text):
        write_kv_(*to_torch((cache, key, wrong), copy=True), torch.tensor([0, 1, 2]))
    if value is not None:
        with pytest.raises(InvalidInputError, match="value"):
            write_kv(cache, key, None, slots)
        with pytest.raises(InvalidInputError, match="value"):
            write_kv_(*to_torch((cache, key), copy=True), None, torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("other", ["narrow", "wide", "other value_dim"])
def test_blocks_move_between_caches_of_like_values_only(other):
    one, none = cache_of("latent"), jnp.zeros(0, jnp.int32)
    two = KVCache(one.key, None, value_dim=3) if other.startswith("other") else cache_of(other)
    with pytest.raises(InvalidInputError, match="value_dim"):
        swap_blocks(one, two, none, none)
    with pytest.raises(InvalidInputError, match="value_dim"):
        swap_blocks_(*to_torch((one, two), copy=True), none, none)


@pytest.mark.parametrize("value_dim", [0, -1, 2.5, "x"])
def test_sizes_are_checked(value_dim):
    with pytest.raises(InvalidInputError, match="value_dim"):
        init_kv_cache(1, 4, 1, 8, value_dim=value_dim)
    with pytest.raises(InvalidInputError, match="value_dim"):
        init_latent_cache(1, 4, 8, value_dim)
    with pytest.raises(InvalidInputError, match="value_dim"):
        init_latent_cache(1, 4, 8, 9)

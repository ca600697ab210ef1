"""Attention over caches with per-token scales, by the oracle, which is given what they hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SPECS, mixed, run
from hypothesis import given
from hypothesis import strategies as st
from int4_decodes import INT4_DECODES, int4_decodes

from pagedattn import (
    AttentionSpec,
    UnsupportedError,
    append_tokens,
    copy_blocks,
    fork,
    init_block_pool,
    init_kv_cache,
    make_batch,
    paged_attention,
    write_kv,
)
from pagedattn._dispatch.call import call_of
from pagedattn._dispatch.registry import Framework, can_load, load, names, record
from pagedattn.cache.quantise import dequantised
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem
from pagedattn.testing.running import attend_with_lse
from pagedattn.testing.strategies import seeds

DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2", "int4")


@pytest.fixture
def backend(backend):
    """Those that read such caches."""
    if "token_scales" not in load(backend, Framework.JAX).supports:
        pytest.skip(f"{backend} refuses per-token scales")
    return backend


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("latent", [False, True])
def test_any_dtype_of_queries_with_any_of_caches(backend, cache_dtype, dtype, latent):
    cache = {"cache_dtype": cache_dtype, "token_scales": True}
    cache |= {"latent": True, "value_dim": 8} if latent else {}
    problem = mixed(SPECS["all"], dtype=np.dtype(dtype), **cache)
    if (backend, cache_dtype, latent) == ("triton", "int4", True):
        with pytest.raises(UnsupportedError, match="not of latents"):
            attend_with_lse(problem, backend, jit=True)
        return
    assert_attention_close(*run(problem, backend), problem, name=backend)


@pytest.mark.parametrize("name", INT4_DECODES)
def test_decodes_of_four_bits(backend, name):
    problem = int4_decodes(name)
    assert_attention_close(*run(problem, backend), problem, name=backend)


@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arrays", [(), ("bias",)])
@pytest.mark.parametrize("head_dim", [128, 96, 64, 20])
def test_heads_of_several_groups(backend, cache_dtype, head_dim, arrays, dtype):
    """Of a decode, of several queries, and of a prompt, whose keys a bias may hide from all."""
    cache = {"cache_dtype": cache_dtype, "token_scales": True, "head_dim": head_dim}
    cache |= {"arrays": arrays, "dtype": np.dtype(dtype), "num_heads": 6}
    problem = random_problem([1, 3, 40], [81, 9, 70], SPECS["plain"], **cache)
    assert_attention_close(*run(problem, backend), problem, name=backend)


@pytest.mark.parametrize("cache_dtype", DTYPES)
@given(seed=seeds())
def test_blocks_may_lie_anywhere(backend, cache_dtype, seed):
    cache = {"cache_dtype": cache_dtype, "token_scales": True}
    problem = random_problem([2, 1], [9, 6], SPECS["plain"], num_blocks=8, seed=seed, **cache)
    places = np.random.default_rng(seed).permutation(8)  # the block that comes to each place
    moved = {name: getattr(problem, name)[places] for name in ("key_cache", "value_cache")}
    moved |= {name: getattr(problem, name)[places] for name in ("key_scale", "value_scale")}
    tables = [np.argsort(places)[row].tolist() for row in problem.block_tables]
    elsewhere = run(problem.replace(block_tables=tables, **moved), backend)
    for got, want in zip(elsewhere, run(problem, backend), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_a_fork_reads_the_scales_of_the_blocks_that_it_copies(cache_dtype):
    """A child of a sequence gets a block of its own when it writes: its scales come along."""
    rng, block_size = np.random.default_rng(0), 4
    rows = jnp.asarray(rng.standard_normal((2, 7, 2, 32)), jnp.float32)
    query = jnp.asarray(rng.standard_normal((1, 4, 32)), jnp.float32)
    cache = init_kv_cache(6, block_size, 2, 32, cache_dtype, scales="token")
    pool, _ = append_tokens(
        init_block_pool(6, block_size, max_seqs=2, max_blocks=2), jnp.array([6, 0])
    )
    slots = pool.block_tables[0, jnp.arange(6) // 4] * 4 + jnp.arange(6) % 4
    cache = write_kv(cache, rows[0, :6], rows[1, :6], slots)
    pool, _ = fork(pool, jnp.array([0]), jnp.array([1]))
    pool, grown = append_tokens(pool, jnp.array([0, 1]))
    cache = copy_blocks(cache, grown.copy_src, grown.copy_dst)
    table = np.asarray(pool.block_tables[1])
    assert table[1] != np.asarray(pool.block_tables[0])[1]
    cache = write_kv(cache, rows[0, 6:], rows[1, 6:], jnp.array([table[1] * 4 + 2]))
    batch = make_batch([1], [6], [table.tolist()], block_size=block_size)
    got = paged_attention(query, cache, batch, backend="xla")
    alone = init_kv_cache(2, block_size, 2, 32, cache_dtype, scales="token")
    alone = write_kv(alone, *rows, jnp.arange(7))
    batch = make_batch([1], [6], [[0, 1]], block_size=block_size)
    np.testing.assert_array_equal(got, paged_attention(query, alone, batch, backend="xla"))


@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_gradients_are_those_of_what_is_read(backend, cache_dtype):
    """Of the queries, and of the scales: what no query sees holds NaN and gets 0."""
    if backend == "sdpa" and cache_dtype.startswith("float8"):
        pytest.importorskip("torch", minversion="2.9")  # older ones take none from JAX
    problem = random_problem([2], [7], SPECS["plain"], cache_dtype=cache_dtype, token_scales=True)
    query, cache, batch = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)

    def total(query, scales, plain):
        held = jax.tree.map(lambda x: x, cache)
        held = type(cache)(held.key, held.value, *scales)
        if plain:
            planes = zip(held.planes, scales, strict=True)
            held = type(cache)(*(dequantised(*pair, jnp.float32) for pair in planes))
        name = "xla" if plain else backend
        return (paged_attention(query, held, batch, problem.spec, backend=name) ** 2).sum()

    scales = cache.key_scale, cache.value_scale
    got = jax.grad(total, (0, 1), allow_int=True)(query, scales, False)
    seen = jnp.asarray(problem.visible_slots)
    want = jax.grad(total, (0, 1))(query, scales, True)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-5)
    for mine, other in zip(got[1], want[1], strict=True):
        here = np.asarray(mine, np.float32)
        assert (here[~np.asarray(seen)] == 0).all()
        atol = 1e-3 if cache_dtype == "int4" else 1e-4
        np.testing.assert_allclose(here[seen], np.asarray(other, np.float32)[seen], 2e-3, atol)


@pytest.mark.parametrize("framework", Framework)
def test_others_refuse_by_name(framework):
    problem = mixed(AttentionSpec(), cache_dtype="int8", token_scales=True)
    call = call_of(jnp.asarray(problem.query), cache_of(problem), batch_of(problem), problem.spec)
    reads = []
    for name in filter(lambda name: can_load(name, framework), names(framework)):
        backend = record(name, framework)
        if "token_scales" in backend.supports:
            reads.append(name)
        else:
            assert f"token_scales: {name} does not have it" in backend.why_not(call)
    assert "sdpa" in reads


@pytest.mark.parametrize("cache_dtype", DTYPES)
@given(data=st.data())
def test_a_token_has_the_same_bits_in_any_company(cache_dtype, data):
    lens = data.draw(st.integers(1, 30))
    seed = data.draw(seeds())
    cache = {"cache_dtype": cache_dtype, "token_scales": True, "poison": None}
    problem = random_problem([1, 4, 2], [lens, 9, 17], SPECS["plain"], seed=seed, **cache)
    alone = problem.replace(
        query=problem.query[:1],
        block_tables=problem.block_tables[:1],
        query_lens=[1],
        seq_lens=[lens],
    )
    many, one = (attend_invariant(p) for p in (problem, alone))
    np.testing.assert_array_equal(many[0], one[0])


def attend_invariant(problem):
    query, cache, batch = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    options = {"backend": "xla", "batch_invariant": True}
    return np.asarray(paged_attention(query, cache, batch, problem.spec, **options))

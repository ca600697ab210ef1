"""Prompts and chunks by the CPU's kernel: long queries, packed keys, matrix products."""

import dataclasses
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedattn import AttentionSpec, KVCache, explain, make_batch, paged_attention
from pagedattn._dispatch.registry import can_load
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem
from pagedattn.testing.features import CACHE_DTYPES, DTYPES

if not can_load("numba") or jax.default_backend() != "cpu":
    pytest.skip("needs numba, and JAX on a CPU", allow_module_level=True)

from cases import grown
from cpu_prompts import CASES, SIZES, attend, check, problem_of

from pagedattn._kernels.cpu.prefill import weights
from pagedattn._kernels.cpu.simd import HAS_BF16_DOT
from pagedattn.backends import numba

LONG = 97  # queries, whatever the dtypes and the group are
HERE = Path(__file__).parent
SPECS = st.builds(
    AttentionSpec,
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.3, -0.2]),
    sliding_window=st.sampled_from([None, 1, 30, 257, 1000]),
    logits_soft_cap=st.sampled_from([None, 2.0]),
)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_as_the_oracle_has_it(name, dtype, threads):
    check(problem_of(name, dtype), threads)


SHARED = {
    "plain": {"num_heads": 8, "num_kv_heads": 4, "head_dim": 64},
    "one KV head": {"num_heads": 6, "num_kv_heads": 1, "head_dim": 32},
    "three, of groups of 8": {"num_heads": 24, "num_kv_heads": 3, "head_dim": 64},
    "eight bits": {"num_kv_heads": 4, "cache_dtype": "int8", "token_scales": True},
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sizes", SHARED)
@pytest.mark.parametrize("length", [1400, 1537])
@given(threads=st.integers(2, 9), queries=st.sampled_from([1, 4, 9]), seed=st.integers(0, 99))
@settings(max_examples=6)
def test_threads_that_share_a_sequence_change_no_bit(sizes, dtype, length, threads, queries, seed):
    """Alone its segments are work items, in a batch all its KV heads together, or some of them."""
    sizes = SIZES | SHARED[sizes] | {"dtype": jnp.dtype(dtype), "seed": seed}
    problem = random_problem([queries] * 3, [length, length - 1, 40], AttentionSpec(), **sizes)
    arrays = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    want = _in_order(arrays, threads=1)
    np.testing.assert_array_equal(_in_order(arrays, threads), want)
    for seq in range(2):
        alone = problem.query_start_loc[seq : seq + 2]
        batch = make_batch(
            [queries],
            [int(problem.seq_lens[seq]) - queries],
            problem.block_tables[seq : seq + 1],
            block_size=SIZES["block_size"],
        )
        got = _in_order((arrays[0][slice(*alone)], arrays[1], batch), threads)
        np.testing.assert_array_equal(got, want[slice(*alone)])


def _in_order(arrays, threads):
    chosen = numba.with_threads(threads)
    out = paged_attention(*arrays, backend=chosen, batch_invariant=True)
    return np.asarray(out, np.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("name", ["chunks and decodes", "every option", "small heads"])
def test_of_eight_bits(name, cache_dtype, dtype):
    check(problem_of(name, dtype, cache_dtype=cache_dtype), 2)


@given(
    lens=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 400)), min_size=1, max_size=4),
    spec=SPECS,
    sizes=st.sampled_from([(4, 2, 32), (3, 1, 40), (2, 2, 7), (16, 1, 64)]),
    block_size=st.sampled_from([1, 7, 16, 64]),
    threads=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_any_lengths(lens, spec, sizes, block_size, threads, seed):
    names = dict(zip(("num_heads", "num_kv_heads", "head_dim"), sizes, strict=True))
    names |= {"block_size": block_size, "dtype": jnp.dtype("bfloat16"), "seed": seed}
    query_lens, seq_lens = [n for n, _ in lens], [n + more for n, more in lens]
    check(random_problem(query_lens, seq_lens, spec, **names), threads)


@given(
    length=st.integers(LONG, 700),
    cuts=st.lists(st.integers(LONG, 300), max_size=4),
    threads=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    window=st.sampled_from([None, 50, 300]),
)
def test_the_same_bits_in_any_chunks_and_by_any_threads(length, cuts, threads, window):
    """As long as all chunks are long ones."""
    kinds = SIZES | {"dtype": jnp.dtype("bfloat16"), "poison": None}
    whole = random_problem([length], [length], AttentionSpec(sliding_window=window), **kinds)
    out, lse = map(np.asarray, attend(whole, threads[0]))
    begin = 0
    for size in [*cuts, length]:
        end = min(begin + size, length)
        if end - begin < LONG:
            break
        part = whole.replace(query=whole.query[begin:end], query_lens=[end - begin], seq_lens=[end])
        got = map(np.asarray, attend(part, threads[1]))
        for of_part, of_whole in zip(got, (out, lse), strict=True):
            np.testing.assert_array_equal(of_part, of_whole[begin:end])
        begin = end


CAUSAL = [name for name, (_, _, options, _) in CASES.items() if options.get("causal", True)]
HELD = {
    "as the query": {},
    "int8": {"cache_dtype": "int8"},
    "int8 by tokens": {"cache_dtype": "int8", "token_scales": True},
    "int4": {"cache_dtype": "int4", "token_scales": True},
}


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("name", CAUSAL)
def test_drafts_that_branch(name, held):
    if held == "int4" and name == "small heads":
        pytest.skip("int4 has heads of an even number of columns")
    problem = problem_of(name, poison=None, **HELD[held])
    check(grown(problem, seed=len(name)).poisoned(), 2)


@given(
    trees=st.lists(
        st.tuples(st.integers(0, 600), st.integers(0, 400), st.sampled_from([0.0, 0.02, 0.5, 1.0])),
        min_size=1,
        max_size=4,
    ),
    window=st.sampled_from([None, 1, 30, 257]),
    slopes=st.sampled_from([None, (0.5, -0.25, 1.0, 0.0)]),
    arrays=st.sampled_from([(), ("bias",)]),
    threads=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_trees_among_chains_and_decodes(trees, window, slopes, arrays, threads, seed):
    """Of more drafts than a tile has keys or rows, on contexts that end anywhere in a tile."""
    query_lens, context_lens, branching = map(np.array, zip(*trees, strict=True))
    sizes = SIZES | {"poison": None, "arrays": arrays, "seed": seed}
    spec = AttentionSpec(sliding_window=window, alibi_slopes=slopes)
    problem = random_problem(query_lens, query_lens + context_lens, spec, **sizes)
    problem = grown(problem, seed, np.repeat(branching, query_lens))
    check(problem.poisoned(), threads)


def test_a_long_chain_has_the_bits_of_a_prompt():
    spec = AttentionSpec(sliding_window=300, alibi_slopes=(0.5, -0.25, 1.0, 0.0))
    problem = random_problem([LONG, 700], [400, 900], spec, **SIZES | {"poison": None})
    for got, want in zip(attend(grown(problem, 0, 0.0), 2), attend(problem, 2), strict=True):
        np.testing.assert_array_equal(got, want)


def _alone(query, key, value, **options):
    """Prompts of keys and values given as `[num_keys, head_dim]`."""
    count, head_dim = key.shape
    cache = KVCache(*(jnp.asarray(x).reshape(count, 1, 1, head_dim) for x in (key, value)))
    batch = make_batch([len(query)], [count - len(query)], [list(range(count))], block_size=1)
    query = jnp.asarray(query)[:, None]
    out, lse = paged_attention(query, cache, batch, backend="numba", return_lse=True, **options)
    return np.asarray(out)[:, 0], np.asarray(lse)[:, 0]


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF])
def test_nan_in_a_query_stays_nan(bits):
    """Whatever its payload is; other rows are as they were."""
    query, key, value = np.random.default_rng(0).standard_normal((3, 100, 16), np.float32)
    out, lse = _alone(query, key, value)
    query[40, 3] = np.uint32(bits).view(np.float32)
    got, got_lse = _alone(query, key, value)
    assert np.isnan(got[40]).all()
    assert np.isnan(got_lse[40])
    others = np.arange(100) != 40
    np.testing.assert_array_equal(got[others], out[others])
    np.testing.assert_array_equal(got_lse[others], lse[others])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bias_of_the_least_number_hides_nothing(dtype):
    """Where all keys have it, all weigh alike, as by the formula."""
    key = np.zeros((100, 16), dtype)
    value = np.repeat(np.arange(100)[:, None], 16, 1).astype(dtype)
    bias = jnp.full((100, 1, 100), np.finfo(np.float32).min)
    out, _ = _alone(key, key, value, bias=bias)
    want = np.arange(100)[:, None] / 2
    np.testing.assert_allclose(out.astype(np.float32), np.repeat(want, 16, 1), rtol=2**-7)


def test_values_that_a_bias_hides_from_all_may_be_nan():
    query, key, value = np.random.default_rng(0).standard_normal((3, 300, 16), np.float32)
    bias = np.zeros((300, 1, 300), np.float32)
    bias[:, :, [5, 270]] = -np.inf
    out, lse = _alone(query, key, value, bias=jnp.asarray(bias))
    key[[5, 270]], value[[5, 270]] = np.nan, np.nan
    got, got_lse = _alone(query, key, value, bias=jnp.asarray(bias))
    np.testing.assert_array_equal(got, out)
    np.testing.assert_array_equal(got_lse, lse)


@pytest.mark.parametrize("peak", [30.0, 300.0, -300.0])
def test_logits_that_grow_along_the_keys(peak):
    """Sums are scaled down at each jump: the last keys outweigh all before, or the first do."""
    problem = random_problem(
        [300], [700], AttentionSpec(), **SIZES | {"dtype": np.dtype("float32")}
    )
    slope = np.linspace(0, peak, problem.query.shape[0] + 400, dtype=np.float32)
    bias = np.broadcast_to(slope, (300, 1, 700)).copy()
    check(problem.replace(bias=bias), 2)


@pytest.mark.parametrize("first", [-np.inf, np.finfo(np.float32).min, -1e9, -30.0, 300.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_first_key_unlike_the_others(first, dtype):
    """Its logit stands for the row's highest one until others are seen to be higher."""
    sizes = SIZES | {"dtype": jnp.dtype(dtype)}
    problem = random_problem([300], [700], AttentionSpec(), **sizes)
    bias = np.zeros((300, 1, 700), np.float32)
    bias[:, :, 0] = first
    check(problem.replace(bias=bias), 2)


@pytest.mark.parametrize(("terms", "error"), [(weights.FIVE, 1.8e-7), (weights.FOUR, 3e-6)])
def test_the_polynomial_is_as_close_as_it_says(terms, error):
    x = np.linspace(0, 1, 100_001).astype(np.float32)
    found = np.full_like(x, np.float32(terms[0]))
    for term in (*terms[1:], 1.0):
        found = (found.astype(np.float64) * x + np.float32(term)).astype(np.float32)
    assert np.abs(found / np.exp2(x.astype(np.float64)) - 1).max() < error


def test_it_is_the_choice_for_prompts():
    problem = random_problem([100] * 3, [100] * 3, AttentionSpec())
    why = explain(jnp.asarray(problem.query), cache_of(problem), batch_of(problem))
    assert why["numba"] == []
    assert "numba" not in why.passed_over


def test_queries_that_a_bound_denied_are_computed():
    """A program that was compiled for short queries gets a long one: slow, but right."""
    problem = random_problem([100, 1], [130, 9], AttentionSpec(), **SIZES)
    batch = dataclasses.replace(batch_of(problem), max_query_len=1)
    attend = jax.jit(partial(paged_attention, backend="numba", return_lse=True))
    out, lse = attend(jnp.asarray(problem.query), cache_of(problem), batch)
    assert_attention_close(np.asarray(out), np.asarray(lse), problem)


@pytest.mark.skipif(not HAS_BF16_DOT, reason="needs products of pairs of bfloat16")
def test_amx_emulated(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(HERE / "amx_emulated.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE.parents[1],
    )
    assert done.stdout.split() == ["right"], done.stderr[-3000:]


def test_equal_from_torch():
    torch = pytest.importorskip("torch")
    layers = pytest.importorskip("pagedattn_torch")
    problem = problem_of("chunks and decodes", "float32")
    query, cache = torch.from_numpy(problem.query), cache_of(problem)
    cache = KVCache(*map(torch.from_dlpack, cache.planes))
    step = layers.prepare(query, cache, batch_of(problem), problem.spec, backend="numba")
    out, _ = step.attend(query, cache)
    assert_attention_close(out, None, problem)
    np.testing.assert_array_equal(out.numpy(), np.asarray(attend(problem, 1)[0]))

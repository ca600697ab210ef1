"""Caches in eight bits by the Mosaic kernel: what it takes, its programs, on a GPU its results."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SPECS
from hard_problems import HARDER, with_scales_apart
from hypothesis import given
from hypothesis import strategies as st
from mosaic_rules import BF16, hopper

from pagedattn import AttentionSpec, init_kv_cache, make_batch, paged_attention
from pagedattn._dispatch.call import call_of
from pagedattn.backends import mosaic
from pagedattn.backends.mosaic.dense import launch
from pagedattn.backends.mosaic.dense.float16 import factors
from pagedattn.backends.mosaic.dense.launch import attend
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem

DTYPES = "int8", "float8_e4m3fn", "float8_e5m2"
scales = pytest.mark.parametrize("scales", ["head", "token"])
LENGTHS = (([300, 1, 40], [300, 5, 900]), ([8, 1, 0], [8, 2000, 12]))


def a_call(
    cache_dtype="int8", scales="token", *, dtype=jnp.bfloat16, query_lens=(290, 10), **sizes
):
    sizes = {"block_size": 16, "head_dim": 128} | sizes
    cache = init_kv_cache(9, num_kv_heads=2, dtype=cache_dtype, scales=scales, **sizes)
    tables, size = [range(2, 41), [0, 1]], sizes["block_size"]
    batch = make_batch(query_lens, [0, 0], tables, block_size=size)
    query = jnp.zeros((sum(query_lens), 4, sizes["head_dim"]), dtype)
    return call_of(query, cache, batch, AttentionSpec(), return_lse=True), query, cache, batch


@pytest.mark.lowers
@pytest.mark.parametrize(
    ("dtype", "block_size", "scales"),
    [
        *((dtype, 32, scales) for dtype in DTYPES for scales in ("head", "token")),
        *(("int8", block_size, "token") for block_size in (8, 64, 128, 256)),
    ],
)
def test_lowers(dtype, block_size, scales):
    traced = attend.trace(*a_call(dtype, scales, block_size=block_size), 132)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.lowers
@scales
def test_short_queries_lower(scales):
    traced = attend.trace(*a_call("int8", scales, query_lens=(9, 1)), 132)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"dtype": jnp.float16}, "bfloat16"),
        ({"head_dim": 64}, "head_dim 128"),
        ({"head_dim": 256}, "head_dim 128"),
    ],
)
def test_refusals(bad, named):
    (reason,) = launch._unsupported_bits(a_call(**bad)[0])
    assert reason.startswith("cache_dtype")
    assert named in reason


@scales
def test_refuses_neither_dtypes_nor_scales(scales):
    for dtype in DTYPES:
        call = a_call(dtype, scales)[0]
        assert not launch._unsupported_bits(call)
        assert not any(map(mosaic.BACKEND.lacks, call.set_options))


@scales
def test_is_taken_for_full_tiles(scales):
    """With few rows in a tile, keys are widened for them alone: `triton` is ahead."""
    call, *_ = a_call("int8", scales)
    assert not launch.slower_because(call)
    many = dataclasses.replace(call, num_seqs=64, max_blocks=256, max_query_len=8, num_tokens=512)
    (reason,) = launch.slower_because(many)
    assert "short queries" in reason
    without = dataclasses.replace(many, cache_dtype=None, token_scales=False)
    assert not launch.slower_because(without)
    assert not launch.slower_because(dataclasses.replace(many, max_query_len=64, num_tokens=4096))
    few = dataclasses.replace(many, max_query_len=64, num_tokens=512, num_seqs=8)
    assert launch.slower_because(few)


@given(st.floats(0, float(np.finfo(np.float32).max), width=32, allow_subnormal=False))
def test_factors_take_queries_into_the_range_of_float16(largest):
    up, down = map(float, factors(jnp.float32(largest)))
    assert up * down == 1
    assert largest * up < 2**15
    assert largest < 2.0**-86 or largest * up >= 2**14
    # What it joins, the logits' scale, may be small: a product of 0 would hide what is visible.
    assert down >= 2.0**-100


@pytest.mark.parametrize("odd", [np.inf, np.nan])
def test_factors_of_queries_without_a_range_are_positive(odd):
    assert all(0 < float(factor) < np.inf for factor in factors(jnp.float32(odd)))


@hopper
@pytest.mark.parametrize("harder", HARDER)
@scales
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_far_apart(dtype, scales, harder):
    kinds = {"cache_dtype": dtype, "token_scales": scales == "token", "dtype": BF16}
    sizes = {"head_dim": 128, "block_size": 16}
    problem = random_problem([40, 1, 9], [450, 33, 129], AttentionSpec(), **sizes, **kinds)
    check(HARDER[harder](problem))


@hopper
@pytest.mark.parametrize("query_lens", [[40, 1, 9], [1, 1, 1], [400, 30, 120]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_far_apart(dtype, query_lens):
    kinds = {"cache_dtype": dtype, "token_scales": True, "dtype": BF16}
    sizes = {"head_dim": 128, "block_size": 16}
    problem = random_problem(query_lens, [1450, 33, 229], AttentionSpec(), **sizes, **kinds)
    check(with_scales_apart(problem))


@hopper
@pytest.mark.parametrize(
    "kinds",
    [
        {"cache_dtype": "float8_e4m3fn"},
        {"cache_dtype": "int8", "token_scales": True},
        {"cache_dtype": "float8_e5m2", "token_scales": True},
    ],
)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("query_lens", "seq_lens"), LENGTHS)
def test_every_feature(query_lens, seq_lens, name, kinds):
    problem = random_problem(
        query_lens, seq_lens, SPECS[name], head_dim=128, block_size=16, dtype=BF16, **kinds
    )
    check(problem)


@hopper
@pytest.mark.parametrize("block_size", [8, 32, 64, 128, 256])
@pytest.mark.parametrize("query_lens", [[40, 1, 9], [1, 1, 1]])
def test_every_block_size(query_lens, block_size):
    spec, kinds = AttentionSpec(sliding_window=100), {"cache_dtype": "int8", "token_scales": True}
    sizes = {"head_dim": 128, "block_size": block_size, "dtype": BF16}
    check(random_problem(query_lens, [450, 33, 129], spec, **sizes, **kinds))


def check(problem):
    arrays = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    call = jax.jit(
        lambda *arrays: paged_attention(*arrays, problem.spec, backend="mosaic", return_lse=True)
    )
    assert_attention_close(*call(*arrays), problem, name="mosaic")

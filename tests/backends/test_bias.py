"""A bias: added to the logits of each token, over the keys of its sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SPECS, good_call, may_refuse, mixed, replace_spec, run
from jax.test_util import check_grads

from pagedattn import (
    AttentionSpec,
    InvalidInputError,
    attention_bias,
    paged_attention,
    ragged_attention,
)
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem

MIXED = {"query_lens": [6, 7, 1, 0], "seq_lens": [4, 19, 22, 9]}
MAX_KEYS = 24


@pytest.fixture
def backend(backend):
    """Those that have a bias."""
    if may_refuse(backend, "bias"):
        pytest.skip(f"{backend} refuses a bias")
    return backend


def with_bias(problem, bias, **changes):
    return problem.replace(bias=np.asarray(bias, np.float32), **changes)


def bias_of_spec(problem, spec):
    """What the spec adds to the logits and hides, as a bias `[num_tokens, heads, max_keys]`."""
    positions = np.asarray(batch_of(problem).positions)
    bias = np.asarray(attention_bias(positions, np.arange(MAX_KEYS), spec))
    return bias[:, None] if bias.ndim == 2 else bias.swapaxes(0, 1)


@pytest.mark.parametrize("name", ["plain", "all"])
def test_causality_and_the_others_as_a_bias(backend, mode, name):
    """What a spec does after the scale and the cap is a bias without it."""
    problem = random_problem(**MIXED, spec=SPECS[name], pad_tokens=17, poison=None)
    bias = bias_of_spec(problem, problem.spec)
    bare = replace_spec(problem, causal=False, sliding_window=None, alibi_slopes=None)
    assert_attention_close(*run(with_bias(bare, bias), backend, mode), problem, name=backend)


def test_a_bias_behind_a_window_of_pages(backend):
    """A window leaves out the first pages: columns still count from the first key."""
    spec = AttentionSpec(sliding_window=5)
    problem = random_problem([3, 1, 9], [31, 40, 20], spec, arrays=["bias"])
    assert_attention_close(*run(problem, backend), problem, name=backend)


def test_a_bias_over_many_chunks_of_keys(backend):
    problem = random_problem([2, 1], [600, 300], AttentionSpec(), block_size=16, arrays=["bias"])
    assert_attention_close(*run(problem, backend), problem, name=backend)


def test_one_for_all_heads_and_halves(backend):
    problem = mixed(SPECS["all"], arrays=["bias"], dtype=np.float16)
    one = problem.replace(bias=problem.bias[:, :1].astype(np.float16))
    assert_attention_close(*run(one, backend), one, name=backend)


def test_fewer_columns_are_an_error_and_hidden_in_jit(backend):
    problem = random_problem(**MIXED, spec=AttentionSpec(causal=False), poison=None)
    bias = np.random.default_rng(0).standard_normal((14, 1, MAX_KEYS)).astype(np.float32)
    bias[:, :, 21:] = -np.inf
    got = run(with_bias(problem, bias[:, :, :21]), backend, "jit")
    assert_attention_close(*got, with_bias(problem, bias), name=backend)
    with pytest.raises(InvalidInputError, match="a column for each key"):
        run(with_bias(problem, bias[:, :, :21]), backend, "eager")


def test_gradients(backend):
    """Of the bias too, with NaN in what it hides, and in its entries for keys that are hidden."""
    problem = random_problem([3, 4, 0], [3, 19, 5], AttentionSpec(), arrays=["bias"])
    problem = problem.replace(bias=np.where(np.arange(20) == 2, -np.inf, problem.bias)).poisoned()
    batch, cache = batch_of(problem), cache_of(problem)
    weights = jax.random.normal(jax.random.key(0), problem.query.shape)
    finite = jnp.isfinite(problem.bias)

    def loss(query, bias):
        options = {"backend": backend, "return_lse": True}
        bias = jnp.where(finite, bias, problem.bias)
        out, lse = paged_attention(query, cache, batch, bias=bias, **options)
        return (out * weights).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    arrays = jnp.asarray(problem.query), jnp.where(finite, problem.bias, 0)
    check_grads(jax.jit(loss), arrays, 1, ["rev"], atol=2e-2, rtol=2e-2, eps=1e-2)


@pytest.mark.parametrize(
    "bias",
    [
        jnp.zeros((20, 1)),
        jnp.zeros((19, 1, 24)),
        jnp.zeros((20, 2, 24)),
        jnp.zeros((20, 1, 24), jnp.bfloat16),
        jnp.zeros((20, 1, 24), jnp.int32),
        jnp.zeros((20, 1, 0)),
        [0.0],
    ],
)
def test_wrong_shapes_and_dtypes(bias):
    with pytest.raises(InvalidInputError, match="bias must be"):
        paged_attention(*good_call(), bias=bias)


def test_packed_keys():
    """Causality as a bias: without a cache too."""
    query, key, value = np.random.default_rng(0).standard_normal((3, 5, 2, 8)).astype(np.float32)
    starts = np.array([0, 2, 5])
    positions = np.array([0, 1, 0, 1, 2])
    bias = np.asarray(attention_bias(positions, np.arange(3), AttentionSpec()))[:, None]
    call = (query, key, value, starts, starts)
    lens = {"max_query_len": 3, "max_key_len": 3}
    got = ragged_attention(*call, AttentionSpec(causal=False), bias=bias, **lens)
    np.testing.assert_allclose(got, ragged_attention(*call, **lens), rtol=1e-5)

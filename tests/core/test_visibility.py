"""Biases: the same values in numpy, JAX and torch, from integer distances."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import SIGNED, SPECS

from pagedattn import (
    AttentionSpec,
    InvalidInputError,
    alibi_bias,
    alibi_slopes,
    attention_bias,
    causal_mask,
    sliding_window_mask,
)
from pagedattn.testing.oracle import visible_keys

FRAMEWORKS = {
    "numpy": lambda x: np.asarray(x, np.int32),
    "jax": lambda x: jnp.asarray(x, jnp.int32),
    "torch": lambda x: torch.tensor(np.asarray(x), dtype=torch.int32),
}


@pytest.fixture(params=FRAMEWORKS)
def array(request):
    return FRAMEWORKS[request.param]


def reference_bias(query_len, seq_len, spec):
    """float32 `[(num_heads,) q, k]` by loops."""
    seen = visible_keys(query_len, seq_len, spec)
    slopes = (0.0,) if spec.alibi_slopes is None else spec.alibi_slopes
    bias = np.full((len(slopes), query_len, seq_len), -np.inf, np.float32)
    for h, i, j in np.argwhere(np.broadcast_to(seen, bias.shape)):
        distance = abs(seq_len - query_len + i - j)
        bias[h, i, j] = -np.float32(slopes[h]) * np.float32(distance)
    return bias[0] if spec.alibi_slopes is None else bias


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("query_len", "seq_len"), [(4, 9), (6, 6), (1, 12), (5, 2)])
def test_attention_bias(array, name, query_len, seq_len):
    spec = SPECS[name]
    p, j = array(np.arange(seq_len - query_len, seq_len)), array(np.arange(seq_len))
    bias = attention_bias(p, j, spec)
    assert type(bias) is type(p)
    assert str(bias.dtype).endswith("float32")
    np.testing.assert_array_equal(np.asarray(bias), reference_bias(query_len, seq_len, spec))


def test_masks(array):
    p, j = array([2, 3]), array(range(5))
    causal = np.asarray(causal_mask(p, j))
    window = np.asarray(sliding_window_mask(p, j, 2))
    assert causal.dtype == window.dtype == bool
    np.testing.assert_array_equal(causal, [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    np.testing.assert_array_equal(window, [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]])


def test_alibi_is_symmetric_and_takes_any_sign(array):
    bias = np.asarray(alibi_bias(array([2]), array(range(5)), SIGNED))
    distance = np.array([2, 1, 0, 1, 2], np.float32)
    np.testing.assert_array_equal(bias[:, 0], -np.float32(SIGNED)[:, None] * distance)


def test_distances_are_exact_far_away(array):
    # bfloat16 has no integers between 100096 and 100608, float16 none at all
    bias = np.asarray(alibi_bias(array([200_001]), array([100_000, 100_001, 200_000]), (1.0,)))
    np.testing.assert_array_equal(bias.ravel(), [-100_001, -100_000, -1])


def test_int32_positions_do_not_wrap(array):
    far = 2**30
    assert np.asarray(causal_mask(array([0]), array([far]))).tolist() == [[False]]
    assert np.asarray(sliding_window_mask(array([far]), array([0]), 5)).tolist() == [[False]]


@pytest.mark.parametrize("num_heads", [1, 2, 8, 64])
def test_slopes_of_powers_of_two(num_heads):
    want = [2 ** (-8 * i / num_heads) for i in range(1, num_heads + 1)]
    np.testing.assert_allclose(alibi_slopes(num_heads), want, rtol=1e-12)


@pytest.mark.parametrize(("num_heads", "power"), [(3, 2), (6, 4), (12, 8), (40, 32), (71, 64)])
def test_slopes_of_other_counts(num_heads, power):
    slopes = alibi_slopes(num_heads)
    assert isinstance(slopes, tuple)
    assert len(slopes) == num_heads
    assert slopes[:power] == alibi_slopes(power)
    assert slopes[power:] == alibi_slopes(2 * power)[::2][: num_heads - power]


def test_slopes_fit_a_spec():
    assert hash(AttentionSpec(alibi_slopes=alibi_slopes(6))) == hash(
        AttentionSpec(alibi_slopes=alibi_slopes(6))
    )


@pytest.mark.parametrize("num_heads", [0, -4])
def test_slopes_of_no_heads(num_heads):
    with pytest.raises(InvalidInputError, match="num_heads"):
        alibi_slopes(num_heads)


@pytest.mark.parametrize(
    "slopes",
    [np.ones((2, 3), np.float32), np.array(["a"]), torch.ones(4)],
    ids=["two axes", "text", "another framework"],
)
def test_slopes_that_do_not_go_with_the_positions(slopes):
    with pytest.raises(InvalidInputError, match="slopes"):
        alibi_bias(np.arange(3), np.arange(5), slopes)

"""Biases: the same values in numpy, JAX and torch, from integer distances."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import SIGNED, SPECS
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import (
    AttentionSpec,
    InvalidInputError,
    alibi_bias,
    alibi_slopes,
    attention_bias,
    causal_mask,
    sliding_window_mask,
)
from pagedattn.masks import common_key_range, key_range, sees_a_key
from pagedattn.testing.visibility import visible_keys

FRAMEWORKS = {
    "numpy": lambda x: np.asarray(x, np.int32),
    "jax": lambda x: jnp.asarray(x, jnp.int32),
    "torch": lambda x: torch.tensor(np.asarray(x), dtype=torch.int32),
}


class Foreign:
    """An array that nobody knows, with the protocol alone."""

    def __init__(self, array):
        self.array, self.dtype, self.shape, self.ndim = array, array.dtype, array.shape, array.ndim

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


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


INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
NATIVE = {"numpy": np.asarray, "jax": jnp.asarray, "torch": torch.from_numpy, "protocol": Foreign}


@pytest.mark.parametrize("framework", NATIVE)
@given(
    positions=st.lists(st.integers(0, 127), min_size=2, max_size=6),
    split=st.integers(1, 5),
    dtypes=st.tuples(*[st.sampled_from(INTEGERS)] * 2),
    window=st.integers(1, 300) | st.integers(1, 1 << 70),
)
def test_masks_of_integers_of_any_width(framework, positions, split, dtypes, window):
    """And windows of any: those that are wider than the keys hide nothing."""
    parts = positions[: split % len(positions)] or positions, positions
    arrays = [np.array(part, dtype) for part, dtype in zip(parts, dtypes, strict=True)]
    p, j = map(NATIVE[framework], arrays)
    apart = np.array(parts[0])[:, None] - np.array(parts[1])[None]
    near = np.array([[abs(int(x)) < window for x in row] for row in apart])
    np.testing.assert_array_equal(np.asarray(causal_mask(p, j)), apart >= 0)
    np.testing.assert_array_equal(np.asarray(sliding_window_mask(p, j, window)), near)
    np.testing.assert_array_equal(np.asarray(alibi_bias(p, j, (0.5,)))[0], -0.5 * abs(apart))
    bias = attention_bias(p, j, AttentionSpec(sliding_window=window))
    np.testing.assert_array_equal(np.asarray(bias) == 0, near & (apart >= 0))


def test_arrays_of_the_protocol_alone():
    p, slopes = Foreign(np.arange(2)), Foreign(jnp.array([0.5, 1.0]))
    want = alibi_bias(np.arange(2), np.arange(2), (0.5, 1.0))
    np.testing.assert_array_equal(alibi_bias(p, p, slopes), want)
    with pytest.raises(InvalidInputError, match="both be torch tensors"):
        causal_mask(p, torch.arange(2))
    with pytest.raises(InvalidInputError, match="integers"):
        causal_mask(p, Foreign(np.ones(2)))


@given(
    num_keys=st.integers(0, 8),
    first=st.integers(-4, 9),
    num_queries=st.integers(1, 4),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 12) | st.just(1 << 40),
)
def test_ranges_of_keys(array, num_keys, first, num_queries, causal, window):
    """By the masks of single queries; the widest window leads to no position beyond int32."""
    window = AttentionSpec(sliding_window=window).sliding_window
    p, j = np.arange(first, first + num_queries)[:, None], np.arange(num_keys)[None]
    mask = (j <= p) | (not causal)
    mask &= (abs(p - j) < window) if window else True
    ends = array([first]), array([first + num_queries - 1]), array([num_keys]), causal, window
    begin, end = (int(bound[0]) for bound in key_range(*ends))
    seen = [key for key in range(num_keys) if mask[:, key].any()]
    assert seen == [] or (begin, end) == (seen[0], seen[-1] + 1)
    begin, end = (int(bound[0]) for bound in common_key_range(*ends))
    assert [*range(begin, end)] == [key for key in range(num_keys) if mask[:, key].all()]
    numbers = first, first + num_queries - 1, num_keys, causal, window
    for ranges in (key_range, common_key_range):
        assert ranges(*numbers) == tuple(int(bound[0]) for bound in ranges(*ends))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 1 << 30])
def test_who_sees_a_key(array, window, causal):
    """Queries before, among and behind the keys."""
    p = np.arange(-6, 12)
    for num_keys in range(5):
        j = np.arange(num_keys)[None]
        mask = (j <= p[:, None]) | (not causal)
        mask &= (abs(p[:, None] - j) < window) if window else True
        sees = sees_a_key(array(p), array([num_keys] * len(p)), causal, window)
        np.testing.assert_array_equal(np.asarray(sees), mask.any(axis=1))


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
